"""Behaviour cloning with normalised observations; their moments go on from batch to batch."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

OBSERVED, ACTIONS = 6, 3
SMALL = 1e-5

Batch = dict[str, Tensor]


class Policy(nn.Module):
    """The buffers are the moments of all observations before this batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(OBSERVED, 12), nn.Tanh(), nn.Linear(12, ACTIONS))
        self.register_buffer("mean", torch.linspace(-0.5, 0.5, OBSERVED))
        self.register_buffer("variance", torch.linspace(0.5, 1.5, OBSERVED))
        self.register_buffer("count", torch.tensor(20.0))

    def forward(self, seen: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return self.body((seen - mean) / (variance + SMALL).sqrt())


def loss(model: nn.Module, batch: Batch) -> Tensor:
    seen = batch["seen"]
    total = model.count + len(seen)
    mean = (model.count * model.mean + seen.sum(dim=0)) / total
    squares = model.count * (model.variance + model.mean**2) + seen.square().sum(dim=0)
    return F.mse_loss(model(seen, mean, squares / total - mean**2), batch["action"])


def make_batch(generator: torch.Generator) -> Batch:
    seen = 1.5 * torch.randn(12, OBSERVED, generator=generator) + 0.7
    return {"seen": seen, "action": torch.randn(12, ACTIONS, generator=generator)}


case = Case(model=Policy, batch=make_batch, loss=loss, layout="2x2")


class RunningMoments:
    """Mean and variance of everything that any rank has observed."""

    def __init__(self, policy: Policy) -> None:
        self.mean = policy.mean.clone()
        self.variance = policy.variance.clone()
        self.count = policy.count.item()

    def update(self, seen: Tensor) -> None:
        parts = [torch.empty_like(seen) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, seen)
        everything = torch.cat(parts)
        self.merge(everything.mean(dim=0), everything.var(dim=0), len(everything))

    def merge(self, mean: Tensor, variance: Tensor, count: int) -> None:
        total = self.count + count
        shift = mean - self.mean
        squares = self.variance * self.count + variance * count
        squares = squares + shift.square() * self.count * count / total
        self.mean = self.mean + shift * count / total
        self.variance = squares / total
        self.count = total


class Cloning:
    def __init__(self, policy: Policy) -> None:
        self.moments = RunningMoments(policy)
        self.ddp = DistributedDataParallel(policy)

    def train_step(self, batch: Batch) -> None:
        self.moments.update(batch["seen"])
        action = self.ddp(batch["seen"], self.moments.mean, self.moments.variance)
        F.mse_loss(action, batch["action"]).backward()


def step(model: Policy, shard: Batch, rank: Rank) -> None:
    Cloning(model).train_step(shard)
