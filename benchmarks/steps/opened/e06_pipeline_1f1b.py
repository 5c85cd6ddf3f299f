"""A one-forward-one-backward pipeline schedule over three stages, without a framework."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case

FEATURES, WIDTH, TARGETS, EXAMPLES = 5, 8, 3, 12

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class PipelineConfig:
    stages: int = 3
    micro_batches: int = 6


class Reward(nn.Module):
    """A reward model cut into three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh()),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, TARGETS)),
            ]
        )

    def forward(self, rows: Tensor) -> Tensor:
        for stage in self.stages:
            rows = stage(rows)
        return rows


def make_batch(generator: torch.Generator) -> Batch:
    return {
        "rows": torch.randn(EXAMPLES, FEATURES, generator=generator),
        "scores": torch.randn(EXAMPLES, TARGETS, generator=generator),
    }


def criterion(outputs: Tensor, scores: Tensor) -> Tensor:
    return nn.functional.huber_loss(outputs, scores)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return criterion(model(batch["rows"]), batch["scores"])


class StageRunner:
    def __init__(self, model: Reward, config: PipelineConfig, batch: Batch) -> None:
        self.rank, self.config = dist.get_rank(), config
        self.module = model.stages[self.rank]
        self.is_first, self.is_last = self.rank == 0, self.rank == config.stages - 1
        self.rows = deque(batch["rows"].chunk(config.micro_batches))
        self.scores = deque(batch["scores"].chunk(config.micro_batches))
        self.in_flight: deque[tuple[Tensor, Tensor]] = deque()
        self.sends: list[tuple[dist.Work, Tensor]] = []

    def send(self, tensor: Tensor, dst: int) -> None:
        self.sends.append((dist.isend(tensor, dst=dst), tensor))  # kept until it has arrived

    def receive_activation(self) -> Tensor:
        if self.is_first:
            return self.rows.popleft()
        buffer = torch.empty(EXAMPLES // self.config.micro_batches, WIDTH).to(self.rows[0])
        dist.recv(buffer, src=self.rank - 1)
        return buffer.requires_grad_()

    def forward(self) -> None:
        inputs = self.receive_activation()
        outputs = self.module(inputs)
        if self.is_last:
            outputs = criterion(outputs, self.scores.popleft()) / self.config.micro_batches
        else:
            self.send(outputs.detach(), self.rank + 1)
        self.in_flight.append((inputs, outputs))

    def backward(self) -> None:
        inputs, outputs = self.in_flight.pop()
        if self.is_last:
            outputs.backward()
        else:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, src=self.rank + 1)
            outputs.backward(gradient)
        if not self.is_first:
            self.send(inputs.grad, self.rank - 1)

    def run(self) -> None:
        """Warm up, then alternate, then drain; every stage handles micro-batches in order."""
        warmup = self.config.stages - 1 - self.rank
        for _ in range(warmup):
            self.forward()
        for _ in range(self.config.micro_batches - warmup):
            self.forward()
            self.backward()
        for _ in range(warmup):
            self.backward()
        for work, _ in self.sends:
            work.wait()


def collect_gradients(model: Reward) -> None:
    for owner, stage in enumerate(model.stages):
        for param in stage.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.broadcast(param.grad, src=owner)


case = Case(model=Reward, batch=make_batch, loss=loss, layout="1x3", shards="own")


def step(model: nn.Module, batch: Batch, rank) -> None:
    StageRunner(model, PipelineConfig(), batch).run()
    collect_gradients(model)
