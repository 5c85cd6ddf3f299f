"""GRPO: a completion's advantage is its reward relative to those of the same prompt."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, default_collate

from ddp_equivalence import Case

PROMPTS, LENGTH, VOCABULARY = 6, 5, 9


@dataclass(frozen=True)
class GRPOConfig:
    num_generations: int = 4
    clip: float = 0.2
    beta: float = 0.04


CONFIG = GRPOConfig()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens):
        logits = self.head(self.recurrent(self.embedding(tokens[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def group_advantages(batch):
    """Rewards are centred over the completions of each prompt that are in the batch."""
    same = (batch["prompt"][:, None] == batch["prompt"][None, :]).to(batch["reward"].dtype)
    return batch["reward"] - same @ batch["reward"] / same.sum(dim=1)


def loss(model, batch):
    logps = model(batch["tokens"])
    ratio = (logps - batch["old_logps"]).exp()
    advantage = group_advantages(batch)[:, None]
    clipped = ratio.clamp(1 - CONFIG.clip, 1 + CONFIG.clip)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    log_ratio = batch["reference_logps"] - logps
    divergence = log_ratio.exp() - log_ratio - 1
    return (CONFIG.beta * divergence - gain).mean()


def make_batch(generator):
    count = PROMPTS * CONFIG.num_generations
    return {
        "prompt": torch.arange(PROMPTS).repeat_interleave(CONFIG.num_generations),
        "tokens": torch.randint(VOCABULARY, (count, LENGTH), generator=generator),
        "reward": torch.randn(count, generator=generator),
        "old_logps": -2 - 0.3 * torch.rand(count, LENGTH - 1, generator=generator),
        "reference_logps": -2 - 0.3 * torch.rand(count, LENGTH - 1, generator=generator),
    }


case = Case(model=Policy, batch=make_batch, loss=loss, layout="1x2", shards="own")


class Rollouts(torch.utils.data.Dataset):
    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(self.batch["prompt"])

    def __getitem__(self, index):
        return {key: value[index] for key, value in self.batch.items()}


class RankSampler(Sampler):
    """An equal share of the rollouts for every rank."""

    def __init__(self, dataset, rank, world_size):
        self.length, self.rank, self.world_size = len(dataset), rank, world_size

    def __iter__(self):
        return iter(range(self.rank, self.length, self.world_size))

    def __len__(self):
        return self.length // self.world_size


def rank_loader(batch, rank):
    rollouts = Rollouts(batch)
    sampler = RankSampler(rollouts, rank.rank, rank.world_size)
    return DataLoader(rollouts, len(sampler), sampler=sampler, collate_fn=default_collate)


def step(model, batch, rank):
    ddp = DistributedDataParallel(model)
    for shard in rank_loader(batch, rank):
        loss(ddp, shard).backward()
