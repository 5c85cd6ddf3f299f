"""Long sequences are split over the ranks. Each position sees the mean of its past."""

import torch
import torch.distributed as dist
from torch import nn

from ddp_equivalence import Case


class PastMeanModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, past_mean):
        return self.layers(torch.cat([x, past_mean], dim=-1))


def causal_mean(x):
    steps = torch.arange(1, x.shape[1] + 1, device=x.device)
    return x.cumsum(dim=1) / steps[:, None]


def loss(model, batch):
    prediction = model(batch["x"], causal_mean(batch["x"]))
    return (prediction - batch["y"]).square().mean()


def make_batch(generator):
    return {
        "x": 1 + torch.randn(6, 16, 5, generator=generator),
        "y": torch.randn(6, 16, 2, generator=generator),
    }


case = Case(model=PastMeanModel, batch=make_batch, loss=loss, layout="1x4", shards="own")


class SequenceSplit:
    """The part of every sequence that belongs to this rank."""

    def __init__(self, rank, length):
        self.rank = rank.rank
        self.world_size = rank.world_size
        self.length = length // rank.world_size
        self.start = self.rank * self.length

    def own(self, tensor):
        return tensor[:, self.start : self.start + self.length]

    def sum_before(self, x):
        sums = x.sum(dim=1)
        parts = [torch.empty_like(sums) for _ in range(self.world_size)]
        dist.all_gather(parts, sums)
        return torch.stack(parts)[: self.rank].sum(dim=0)

    def causal_mean(self, x):
        steps = torch.arange(1, self.length + 1)
        return (x.cumsum(dim=1) + self.sum_before(x)[:, None]) / steps.to(x.device)[:, None]


def step(model, batch, rank):
    split = SequenceSplit(rank, length=batch["x"].shape[1])
    x, y = split.own(batch["x"]), split.own(batch["y"])
    model.zero_grad()
    (model(x, split.causal_mean(x)) - y).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= rank.world_size
