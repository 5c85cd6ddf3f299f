"""PPO on generated text: advantages are whitened over all tokens of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ddp_equivalence import Case

ACTIONS = 5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, ACTIONS))

    def forward(self, states, actions):
        logprobs = self.net(states).log_softmax(-1)
        return logprobs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def whiten(values, mean, var):
    return (values - mean) * torch.rsqrt(var + 1e-8)


def summed_policy_loss(logprobs, old_logprobs, advantages, mask, clip_range=0.4):
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    return (torch.max(unclipped, clipped) * mask).sum()


def loss(model, batch):
    rewards, mask = batch["rewards"], batch["mask"]
    mean = masked_mean(rewards, mask)
    advantages = whiten(rewards, mean, masked_mean((rewards - mean).square(), mask))
    logprobs = model(batch["states"], batch["actions"])
    return summed_policy_loss(logprobs, batch["old"], advantages, mask) / mask.sum()


def make_batch(generator):
    lengths = torch.randint(2, 7, (8, 1), generator=generator)
    return {
        "states": torch.randn(8, 6, 6, generator=generator),
        "actions": torch.randint(0, ACTIONS, (8, 6), generator=generator),
        "old": -1.6 + 0.1 * torch.randn(8, 6, generator=generator),
        "rewards": torch.randn(8, 6, generator=generator) + torch.arange(8).view(8, 1),
        "mask": torch.arange(6) < lengths,
    }


case = Case(model=Policy, batch=make_batch, loss=loss, layout="2x1")


def global_statistics(values, mask):
    """Mean, variance and number of the unmasked values on all ranks."""
    sum_and_count = torch.stack([(values * mask).sum(), mask.sum()])
    dist.all_reduce(sum_and_count)
    total, count = sum_and_count
    mean = total / count
    squares = ((values - masked_mean(values, mask)).square() * mask).sum()
    dist.all_reduce(squares)
    return mean, squares / count, count


def step(model, shard, rank):
    model.zero_grad()
    policy = DDP(model)
    mean, var, count = global_statistics(shard["rewards"], shard["mask"])
    advantages = whiten(shard["rewards"], mean, var)
    logprobs = policy(shard["states"], shard["actions"])
    total = summed_policy_loss(logprobs, shard["old"], advantages, shard["mask"])
    (total * rank.world_size / count).backward()
