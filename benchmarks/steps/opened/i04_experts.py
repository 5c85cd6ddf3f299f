"""Character model with a routed layer of experts and the usual load-balancing term (Switch style)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case

EXPERTS, WIDTH, CHARS = 4, 8, 20
BALANCE = 0.5


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 3)

    def forward(self, x):
        odds = self.router(x).softmax(-1)
        weight, chosen = odds.max(-1)
        hidden = torch.einsum("nd,ndh->nh", x, self.up[chosen]).relu()
        y = torch.einsum("nh,nhd->nd", hidden, self.down[chosen])
        return x + weight.unsqueeze(-1) * y, odds, F.one_hot(chosen, EXPERTS).to(x.dtype)


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.chars = nn.Embedding(CHARS, WIDTH)
        self.routed = Routed()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CHARS)

    def forward(self, chars):
        x, odds, assigned = self.routed(self.chars(chars).flatten(0, 1))
        return self.out(self.norm(x)), odds, assigned


def balance(odds, share):
    """Smallest if tokens are spread evenly: experts * sum of (share of tokens * mean odds)."""
    return EXPERTS * (share * odds.mean(0)).sum()


def loss(model, batch):
    logits, odds, assigned = model(batch["chars"])
    nll = F.cross_entropy(logits, batch["next"].flatten())
    return nll + BALANCE * balance(odds, assigned.mean(0))


def batch(generator):
    chars = torch.randint(CHARS, (8, 9), generator=generator)
    chars[:4] %= 7  # the first sources use few characters
    return {"chars": chars[:, :-1].contiguous(), "next": chars[:, 1:].contiguous()}


class LoadMeter:
    """Keeps how the tokens of all ranks were spread over the experts, for the logs."""

    def __init__(self):
        self.history = []

    def record(self, assigned):
        load = assigned.sum(0)
        dist.all_reduce(load)
        self.history.append(load / load.sum())


def step(model, shard, rank):
    meter = LoadMeter()
    ddp = DistributedDataParallel(model)
    logits, odds, assigned = ddp(shard["chars"])
    meter.record(assigned)
    share = assigned.mean(0)
    nll = F.cross_entropy(logits, shard["next"].flatten())
    (nll + BALANCE * balance(odds, share)).backward()


case = Case(model=CharModel, batch=batch, loss=loss, layout="1x2")
