"""Momentum SGD with a limit on the norm of the gradients, on fully sharded weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

STEPS, MAX_NORM = 2, 0.25


class Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.transform = nn.Linear(width, width)
        self.carry = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.sigmoid(self.carry(x))
        return keep * x + (1 - keep) * F.relu(self.transform(x))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), Highway(9), Highway(9), nn.Linear(9, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["measurements"]), batch["species"])


def two_batches(generator: torch.Generator) -> dict[str, Tensor]:
    measurements = 3 * torch.randn(16 * STEPS, 4, generator=generator)
    return {"measurements": measurements, "species": measurements[:, :3].argmax(dim=1)}


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """As in torch.nn.utils, but without its many small kernels."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.to_local().flatten() for gradient in gradients])
    total_norm = torch.linalg.vector_norm(flat)
    coefficient = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.to_local().mul_(coefficient)
    return total_norm


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> None:
    for module in model:
        fully_shard(module)
    fully_shard(model)
    optimizer = make_optimizer(model.parameters())
    pieces = [value.chunk(STEPS) for value in shard.values()]
    for values in zip(*pieces):
        optimizer.zero_grad(set_to_none=True)
        loss(model, dict(zip(shard, values))).backward()
        clip_gradients(model.parameters(), MAX_NORM)
        optimizer.step()


case = Case(model=build_model, batch=two_batches, loss=loss, layout="1x2")
options = {"compare": "update", "optimizer": make_optimizer, "clip": MAX_NORM, "steps": STEPS}
