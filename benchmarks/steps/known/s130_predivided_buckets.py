"""DDP with a communication hook that divides partly before and partly after the all-reduce.

Dividing everything beforehand loses small numbers, and dividing everything afterwards overflows;
so the division by the world size is split in two.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, channels, 3, padding=1)
        self.second = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Waves(nn.Module):
    """Tells four kinds of vibration from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 6, 3, padding=1)
        self.body = nn.Sequential(Residual(6), Residual(6))
        self.head = nn.Linear(6, 4)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.body(self.stem(signals)).mean(-1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["signals"]), batch["kind"], label_smoothing=0.1)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "signals": torch.randn(16, 2, 12, generator=generator),
        "kind": torch.randint(4, (16,), generator=generator),
    }


case = Case(model=Waves, batch=make_batch, loss=loss, layout="1x4")


@dataclass
class Division:
    """How the division by the world size is split."""

    before: float
    after: float

    @classmethod
    def split(cls, world_size: int, predivide: float) -> "Division":
        return cls(before=1 / predivide, after=1 / world_size)


def divided_all_reduce(division: Division, bucket: dist.GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer().mul_(division.before)
    future = dist.all_reduce(buffer, async_op=True).get_future()

    def finish(done: Future[list[Tensor]]) -> Tensor:
        return done.value()[0].mul_(division.after)

    return future.then(finish)


def wrap(model: nn.Module, world_size: int, predivide: float) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
    ddp.register_comm_hook(Division.split(world_size, predivide), divided_all_reduce)
    return ddp


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    ddp = wrap(model, rank.world_size, predivide=2.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    optimizer.zero_grad()
    loss(ddp, shard).backward()
    optimizer.step()
