"""A run that is stopped within an accumulation window, and goes on from its snapshot."""

import io
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

WINDOW = 4
STOPPED_AFTER = 2

Batch = dict[str, Tensor]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 5, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(1, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.norm(self.convolution(x))).mean(dim=-1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(16, 2, 9, generator=generator),
        "label": torch.randint(0, 3, (16,), generator=generator),
    }


case = Case(model=Network, batch=make_batch, loss=loss, layout="1x2")


class Run:
    """Works on one window. Everything that it needs to go on is in its state."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model = model
        self.parts = [value.chunk(WINDOW) for value in batch.values()]
        self.names = list(batch)
        self.micro_step = 0

    def advance(self, stop: int = WINDOW) -> None:
        for index in range(self.micro_step, stop):
            part = {name: parts[index] for name, parts in zip(self.names, self.parts, strict=True)}
            (loss(self.model, part) / WINDOW).backward()
            self.micro_step = index

    def snapshot(self) -> bytes:
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        file = io.BytesIO()
        torch.save({"micro_step": self.micro_step, "gradients": gradients}, file)
        return file.getvalue()

    def restore(self, data: bytes) -> None:
        state: dict[str, Any] = torch.load(io.BytesIO(data))
        self.micro_step = state["micro_step"]
        for name, parameter in self.model.named_parameters():
            parameter.grad = state["gradients"][name].clone()

    def reduce(self, world_size: int) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world_size)


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    first = Run(model, shard)
    first.advance(STOPPED_AFTER)
    data = first.snapshot()
    model.zero_grad()
    second = Run(model, shard)
    second.restore(data)
    second.advance()
    second.reduce(rank.world_size)
