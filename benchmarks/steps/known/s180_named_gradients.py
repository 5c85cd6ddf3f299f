"""A residual regressor. Gradients are kept by name, packed, reduced and unpacked again."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence import Case, Rank

WIDTH, DEPTH = 6, 12

Grads = dict[str, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.inner(x))


class Tower(nn.Module):
    """Many equal layers between an embedding and a linear output."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.leave = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.smooth_l1_loss(model(batch["inputs"]), batch["targets"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "inputs": torch.randn(16, 5, generator=generator),
        "targets": torch.randn(16, 2, generator=generator),
    }


case = Case(model=Tower, batch=make_batch, loss=loss, layout="1x4")


class Packer:
    """Joins gradients of any shape to one vector, and takes the vector apart again."""

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def pack(self, grads: Grads) -> Tensor:
        return torch.cat([grads[name].flatten() for name in sorted(grads)])

    def unpack(self, vector: Tensor) -> Grads:
        parts = vector.split([shape.numel() for shape in self.shapes.values()])
        return {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def reduced(packer: Packer, grads: Grads, world_size: int) -> Grads:
    vector = packer.pack(grads)
    dist.all_reduce(vector)
    return packer.unpack(vector / world_size)


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    packer = Packer(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss(model, shard), parameters)
    mean = reduced(packer, dict(zip(names, grads, strict=True)), rank.world_size)
    for name, parameter in zip(names, parameters, strict=True):
        parameter.grad = mean[name]
