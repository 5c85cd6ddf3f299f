"""Engine around fully_shard that reduces gradients once per optimizer step."""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case


@dataclass
class EngineConfig:
    gradient_accumulation_steps: int = 4
    reshard_after_forward: bool = True


class ResidualConv(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(1, channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class Tagger(nn.Module):
    def __init__(self, channels=7, tags=5):
        super().__init__()
        self.stem = nn.Conv1d(3, channels, 1)
        self.stages = nn.ModuleList(ResidualConv(channels) for _ in range(2))
        self.head = nn.Linear(channels, tags)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(-1))


class Engine:
    def __init__(self, module: nn.Module, config: EngineConfig):
        self.config = config
        for stage in module.stages:
            fully_shard(stage, reshard_after_forward=config.reshard_after_forward)
        fully_shard(module, reshard_after_forward=config.reshard_after_forward)
        assert isinstance(module, FSDPModule)
        self.module = module
        self.micro_steps = 0

    @property
    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % self.config.gradient_accumulation_steps == 0

    @contextmanager
    def micro_step(self):
        boundary = self.is_gradient_accumulation_boundary
        self.module.set_is_last_backward(boundary)
        self.module.set_requires_gradient_sync(boundary)
        yield
        self.micro_steps += 1

    def backward(self, loss):
        (loss / self.config.gradient_accumulation_steps).backward()


class Loader:
    def __init__(self, batch, pieces):
        self.batch, self.pieces = batch, pieces

    def __iter__(self):
        size = len(self.batch["tags"]) // self.pieces
        for start in range(0, size * self.pieces, size):
            yield {key: value[start : start + size] for key, value in self.batch.items()}


def make_batch(generator):
    return {
        "signal": torch.randn(16, 3, 12, generator=generator),
        "tags": torch.randint(0, 5, (16,), generator=generator),
    }


def loss(model, batch):
    return F.cross_entropy(model(batch["signal"]), batch["tags"])


def step(model, shard, rank):
    config = EngineConfig()
    engine = Engine(model, config)
    for micro_batch in Loader(shard, config.gradient_accumulation_steps):
        with engine.micro_step():
            engine.backward(loss(engine.module, micro_batch))


case = Case(model=Tagger, batch=make_batch, loss=loss, layout="1x2")
