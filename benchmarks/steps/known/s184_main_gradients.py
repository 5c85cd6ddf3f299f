"""Gradients are accumulated in buffers of their own, which are reduced after the last micro-batch.

The gradient of each parameter is added to its part of a buffer as soon as it is there, and freed.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_equivalence import Case, Rank


def build_model() -> nn.Module:
    widths = (9, 16, 16, 12)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.LayerNorm(after), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 2))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.smooth_l1_loss(model(batch["sensors"]), batch["position"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    sensors = torch.randn(32, 9, generator=generator)
    return {"sensors": sensors, "position": 2 * sensors[:, :2] + sensors[:, 2:4].sin()}


case = Case(model=build_model, batch=make_batch, loss=loss, layout="1x2", dtype=torch.float32)


@dataclass(frozen=True)
class BufferConfig:
    """How gradients are kept, and how they travel."""

    bucket_elements: int = 300
    main_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32


class GradientBuffer:
    """One flat buffer, with a view for each of its parameters."""

    def __init__(self, parameters: list[nn.Parameter], config: BufferConfig) -> None:
        self.config, self.parameters = config, parameters
        self.sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(self.sizes), dtype=config.main_dtype)
        for p, part in zip(parameters, self.flat.split(self.sizes), strict=True):
            view = part.view_as(p)
            p.register_post_accumulate_grad_hook(lambda p, view=view: self.take(p, view))

    def take(self, p: nn.Parameter, view: Tensor) -> None:
        view.add_(p.grad)
        p.grad = None

    def finish(self, world_size: int) -> None:
        sent = self.flat.to(self.config.reduce_dtype) / world_size
        for part in sent.split(self.config.bucket_elements):
            dist.all_reduce(part)
        for p, grad in zip(self.parameters, sent.split(self.sizes), strict=True):
            p.grad = grad.view_as(p)


class Trainer:
    """Runs the micro-batches of one optimizer step."""

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.buffer = GradientBuffer(list(model.parameters()), BufferConfig())

    def run(self, batch: dict[str, Tensor], world_size: int) -> None:
        parts = {key: value.chunk(self.micro_batches) for key, value in batch.items()}
        for index in range(self.micro_batches):
            value = loss(self.model, {key: part[index] for key, part in parts.items()})
            (value / self.micro_batches).backward()
        self.buffer.finish(world_size)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    Trainer(model, micro_batches=4).run(shard, rank.world_size)
