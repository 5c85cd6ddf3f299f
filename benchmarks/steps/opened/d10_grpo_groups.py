"""Policy gradient with advantages relative to the other completions of the same prompt."""
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case


@dataclass
class GRPOConfig:
    prompts: int = 6
    completions: int = 4
    length: int = 5
    vocab: int = 7
    clip: float = 0.2
    epsilon: float = 1e-4


config = GRPOConfig()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, 8)
        self.head = nn.Linear(8, config.vocab)

    def forward(self, tokens):
        logits = self.head(torch.tanh(self.embedding(tokens[:, :-1])))
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def make_batch(generator):
    """Completions of one prompt follow each other."""
    rows = config.prompts * config.completions
    difficulty = torch.randn(config.prompts, generator=generator).repeat_interleave(config.completions)
    tokens = torch.randint(config.vocab, (rows, config.length), generator=generator)
    return {
        "tokens": tokens,
        "old_logps": torch.randn(rows, config.length - 1, generator=generator) - 2,
        "rewards": 5 * difficulty + torch.randn(rows, generator=generator),
    }


def group_advantages(rewards):
    grouped = rewards.view(-1, config.completions)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + config.epsilon)).flatten()


def grpo_loss(policy, batch):
    advantages = group_advantages(batch["rewards"])[:, None]
    ratio = (policy(batch["tokens"]) - batch["old_logps"]).exp()
    clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


class RolloutSampler:
    """Which rows of the rollout buffer a process trains on."""

    def __init__(self, rows, rank, world):
        self.rows, self.rank, self.world = rows, rank, world

    def indices(self):
        return torch.arange(self.rank, self.rows, self.world)


class GRPOTrainer:
    def __init__(self, policy):
        self.policy = DistributedDataParallel(policy)

    def minibatch(self, rollouts):
        sampler = RolloutSampler(len(rollouts["rewards"]), dist.get_rank(), dist.get_world_size())
        rows = sampler.indices()
        return {name: values[rows] for name, values in rollouts.items()}

    def train_step(self, rollouts):
        grpo_loss(self.policy, self.minibatch(rollouts)).backward()


def step(model, shard, rank):
    GRPOTrainer(model).train_step(shard)


case = Case(model=Policy, batch=make_batch, loss=grpo_loss, layout="1x2", shards="own")
