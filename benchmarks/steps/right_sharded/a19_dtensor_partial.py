"""DTensor by hand: a functional model on replicated weights and a sharded batch.

The loss becomes a partial sum, and so do the gradients until they are made whole.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.func import functional_call

from ddp_equivalence import Case

BIG_BATCH = 20


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 9)
        self.out = nn.Linear(9, 2)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.linear(x)).square()) * self.temperature


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).sum()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return squared_error(model(batch["x"]), batch["y"]) / BIG_BATCH


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(BIG_BATCH, 6, generator=generator)
    return {"x": x, "y": torch.stack([x.norm(dim=1), x.amax(dim=1)], dim=1)}


def step(model: nn.Module, shard: dict[str, Tensor], rank) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    weights = {
        name: distribute_tensor(parameter.detach(), mesh, [Replicate()]).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    global_batch = {
        name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in shard.items()
    }
    outputs = functional_call(model, weights, (global_batch["x"],))
    assert outputs.shape[0] == BIG_BATCH and outputs.placements == (Shard(0),)

    total = squared_error(outputs, global_batch["y"])
    assert total.placements == (Partial("sum"),)
    mean = total.redistribute(placements=[Replicate()]) / BIG_BATCH
    gradients = torch.autograd.grad(mean, list(weights.values()))
    return {name: gradient.full_tensor() for name, gradient in zip(weights, gradients)}


case = Case(model=Quadratic, batch=make_batch, loss=loss, layout="1x4")
