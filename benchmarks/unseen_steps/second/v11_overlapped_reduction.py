"""A masked language model whose gradients are reduced by hooks while backward still runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case, Rank

MASK, VOCABULARY = 0, 23

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class EngineConfig:
    gradient_accumulation_steps: int = 2
    masked_per_row: int = 3


class MaskedLM(nn.Module):
    def __init__(self, width: int = 12, length: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.mixer = nn.Linear(length, length)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 20), nn.GELU())
        self.predict = nn.Linear(20, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        x = x + self.mixer(x.transpose(1, 2)).transpose(1, 2)
        return self.predict(self.mlp(x))


def masked_rows(generator: torch.Generator) -> Batch:
    ids = torch.randint(1, VOCABULARY, (16, 8), generator=generator)
    order = torch.rand(ids.shape, generator=generator).argsort(dim=1)
    masked = order < EngineConfig.masked_per_row
    return {"input_ids": ids.masked_fill(masked, MASK), "labels": ids.masked_fill(~masked, -100)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class Engine:
    """Backward and reduction for a model that is the same on all ranks."""

    def __init__(self, model: nn.Module, config: EngineConfig, world_size: int) -> None:
        self.module, self.config, self.world_size = model, config, world_size
        self.micro_steps = 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce_gradient)

    @property
    def at_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def reduce_gradient(self, parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad)

    def average(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad.div_(self.world_size)

    def backward(self, value: Tensor) -> None:
        (value / self.config.gradient_accumulation_steps).backward()
        if self.at_boundary:
            self.average()
        self.micro_steps += 1


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    parts = {name: values.chunk(count) for name, values in batch.items()}
    return [{name: parts[name][index] for name in parts} for index in range(count)]


case = Case(model=MaskedLM, batch=masked_rows, loss=loss, layout="2x2")


def step(model: nn.Module, shard: Batch, rank: Rank) -> None:
    config = EngineConfig()
    engine = Engine(model, config, rank.world_size)
    for micro_batch in micro_batches(shard, config.gradient_accumulation_steps):
        engine.backward(loss(engine.module, micro_batch))
