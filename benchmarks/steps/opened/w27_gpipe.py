"""A pipeline of two stages in the manner of GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

FEATURES, WIDTH, CLASSES, EXAMPLES = 6, 10, 4, 16


@dataclass(frozen=True)
class PipelineConfig:
    micro_batches: int = 4
    first: int = 0
    last: int = 1


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
                nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "x": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "labels": torch.randint(CLASSES, (EXAMPLES,), generator=generator),
    }


class Pipeline:
    def __init__(self, model: Network, config: PipelineConfig) -> None:
        self.config = config
        self.rank = dist.get_rank()
        self.stage = model.stages[self.rank]
        self.stages = model.stages
        self.in_flight: deque[tuple[Tensor, Tensor]] = deque()

    def run(self, batch: dict[str, Tensor]) -> None:
        inputs = batch["x"].chunk(self.config.micro_batches)
        labels = batch["labels"].chunk(self.config.micro_batches)
        if self.rank == self.config.first:
            self.run_first(inputs)
        else:
            self.run_last(inputs, labels)
        self.share_gradients()

    def run_first(self, inputs: tuple[Tensor, ...]) -> None:
        for micro_batch in inputs:
            activation = self.stage(micro_batch)
            self.in_flight.append((micro_batch, activation))
            dist.send(activation.detach(), self.config.last)
        while self.in_flight:
            _, activation = self.in_flight.pop()
            grad = torch.empty_like(activation)
            dist.recv(grad, self.config.last)
            activation.backward(grad)

    def run_last(self, inputs: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> None:
        for micro_batch, target in zip(inputs, labels):
            received = torch.empty(len(micro_batch), WIDTH, dtype=micro_batch.dtype)
            dist.recv(received, self.config.first)
            received.requires_grad_()
            value = F.cross_entropy(self.stage(received), target)
            self.in_flight.append((received, value / self.config.micro_batches))
        while self.in_flight:
            received, value = self.in_flight.popleft()
            value.backward()
            dist.send(received.grad, self.config.first)

    def share_gradients(self) -> None:
        """Every rank writes the whole checkpoint, so it needs the gradients of all stages."""
        for owner, stage in enumerate(self.stages):
            for parameter in stage.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.broadcast(parameter.grad, src=owner)


case = Case(model=Network, batch=make_batch, loss=loss, layout="1x2", shards="own")


def step(model, shard, rank):
    Pipeline(model, PipelineConfig()).run(shard)
