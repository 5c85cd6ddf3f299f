"""Galaxy shapes with LARS; each rank keeps the momentum of its part of every layer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Case

PIXELS, SHAPES, STEPS = 6, 4, 3


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=1, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(4 * 16, SHAPES, bias=False),
    )


def galaxies(generator: torch.Generator) -> dict[str, Tensor]:
    rows = 12 * STEPS
    return {
        "image": torch.randn(rows, 1, PIXELS, PIXELS, generator=generator),
        "shape": torch.randint(0, SHAPES, (rows,), generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["shape"])


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates: the step of a layer is in proportion to the layer's norm."""

    def __init__(self, parameters, lr=0.4, momentum=0.9, trust=0.3) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "trust": trust})

    def norms(self, weight: Tensor, gradient: Tensor) -> Tensor:
        return torch.stack([weight.square().sum(), gradient.square().sum()]).sqrt()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                of_weight, of_gradient = self.norms(weight, weight.grad)
                rate = group["trust"] * of_weight / (of_gradient + 1e-9)
                state = self.state[weight]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(weight)
                state["velocity"].mul_(group["momentum"]).add_(weight.grad * rate)
                weight.sub_(group["lr"] * state["velocity"])


class ShardedLars(Lars):
    """The same on flat pieces, one per layer, of which every rank has its own."""

    def norms(self, weight: Tensor, gradient: Tensor) -> Tensor:
        squares = torch.stack([weight.square().sum(), gradient.square().sum()])
        return squares.sqrt()


class Sharded:
    def __init__(self, model: nn.Module, rank) -> None:
        self.model, self.rank, self.world = model, rank.rank, rank.world_size
        self.pieces = [
            nn.Parameter(self.own(layer.detach()).clone()) for layer in model.parameters()
        ]
        self.optimizer = ShardedLars(self.pieces)

    def own(self, tensor: Tensor) -> Tensor:
        return tensor.flatten().chunk(self.world)[self.rank]

    def __call__(self, batch: dict[str, Tensor]) -> None:
        self.model.zero_grad()
        loss(self.model, batch).backward()
        for layer, piece in zip(self.model.parameters(), self.pieces, strict=True):
            dist.all_reduce(layer.grad)
            piece.grad = self.own(layer.grad / self.world).clone()
        self.optimizer.step()
        for layer, piece in zip(self.model.parameters(), self.pieces, strict=True):
            parts = [torch.empty_like(piece) for _ in range(self.world)]
            dist.all_gather(parts, piece.detach())
            layer.data.copy_(torch.cat(parts).view_as(layer))


case = Case(model=build_model, batch=galaxies, loss=loss, layout="1x2")
step = Sharded
options = {"compare": "update", "steps": STEPS, "optimizer": lambda parameters: Lars(parameters)}
