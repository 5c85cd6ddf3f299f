"""Two pipeline stages on each replica, with the schedule "one forward, one backward".

Each rank is a whole pipeline; replicas average their gradients when the pipeline has drained.
"""

from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


class TwoStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 10), nn.GELU())
        self.second = nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 12), nn.Tanh())
        self.head = nn.Linear(12, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.finish(self.first(features))

    def finish(self, hidden: Tensor) -> Tensor:
        return self.head(self.second(hidden))


def criterion(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, label_smoothing=0.05)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return criterion(model(batch["features"]), batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "features": torch.randn(32, 7, generator=generator),
        "targets": torch.randint(0, 4, (32,), generator=generator),
    }


case = Case(model=TwoStages, batch=make_batch, loss=loss, layout="1x2")

MicroBatch = tuple[Tensor, Tensor]


class Pipeline:
    """Keeps what passes from the first stage to the second until it has gone back."""

    def __init__(self, model: TwoStages, warmup: int) -> None:
        self.model, self.warmup = model, warmup
        self.in_flight: deque[tuple[Tensor, Tensor]] = deque()

    def forward(self, features: Tensor) -> None:
        output = self.model.first(features)
        self.in_flight.append((output, output.detach().requires_grad_()))

    def backward(self, targets: Tensor, scale: float) -> None:
        output, boundary = self.in_flight.popleft()
        (scale * criterion(self.model.finish(boundary), targets)).backward()
        output.backward(boundary.grad)

    def run(self, micro_batches: list[MicroBatch]) -> None:
        scale = 1 / len(micro_batches)
        for features, _ in micro_batches[: self.warmup]:
            self.forward(features)
        for features, targets in micro_batches[self.warmup :]:
            self.forward(features)
            self.backward(targets, scale)
        while self.in_flight:
            self.backward(micro_batches[-len(self.in_flight)][1], scale)


def average(model: nn.Module, world_size: int) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(world_size)


def step(model: TwoStages, shard: dict[str, Tensor], rank: Rank) -> None:
    pieces = zip(shard["features"].chunk(8), shard["targets"].chunk(8), strict=True)
    Pipeline(model, warmup=2).run(list(pieces))
    average(model, rank.world_size)
