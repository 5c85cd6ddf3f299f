"""GRPO: four answers a prompt, whose rewards are compared within the prompt.

The rollouts come as one stream, sorted by prompt; every rank reads its part of the stream.
"""

import itertools

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from ddp_equivalence import Case

PROMPTS, ANSWERS, TOKENS, VOCAB = 8, 4, 6, 29
BETA, EPS = 0.05, 0.2


class TinyPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, 16)
        self.conv = nn.Conv1d(16, 24, kernel_size=3)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids):
        x = nn.functional.pad(self.wte(ids).transpose(1, 2), (2, 0))
        logps = self.head(torch.tanh(self.conv(x)).transpose(1, 2)).log_softmax(-1)
        return logps[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


def rollouts(g):
    rows = PROMPTS * ANSWERS
    difficulty = torch.randn(PROMPTS, generator=g).repeat_interleave(ANSWERS)
    logps = -3.3 + 0.3 * torch.randn(2, rows, TOKENS - 1, generator=g)
    return {
        "ids": torch.randint(VOCAB, (rows, TOKENS), generator=g),
        "old_logps": logps[0],
        "ref_logps": logps[1],
        "rewards": 2 * difficulty + torch.rand(rows, generator=g),
    }


def group_advantages(rewards):
    groups = rewards.view(-1, ANSWERS)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def loss(model, batch):
    logps = model(batch["ids"])
    adv = group_advantages(batch["rewards"])[:, None]
    ratio = (logps - batch["old_logps"]).exp()
    gain = torch.minimum(ratio * adv, ratio.clamp(1 - EPS, 1 + EPS) * adv)
    delta = batch["ref_logps"] - logps
    kl = delta.exp() - delta - 1
    return (BETA * kl - gain).mean()


case = Case(model=TinyPolicy, batch=rollouts, loss=loss, layout="1x4", shards="own")


class RolloutStream(IterableDataset):
    def __init__(self, rollouts, rank, world_size):
        self.rollouts = rollouts
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return len(self.rollouts["ids"]) // self.world_size

    def rows(self):
        for values in zip(*self.rollouts.values()):
            yield dict(zip(self.rollouts, values))

    def __iter__(self):
        return itertools.islice(self.rows(), self.rank, None, self.world_size)


def step(model, batch, rank):
    stream = RolloutStream(batch, rank.rank, rank.world_size)
    policy = DDP(model)
    for micro in DataLoader(stream, batch_size=len(stream)):
        loss(policy, micro).backward()
