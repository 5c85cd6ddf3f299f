"""Expert parallelism: each rank owns some experts, the other weights are fully sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from ddp_equivalence import Case

EXPERTS, WIDTH, CLASSES = 4, 8, 3


class Experts(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH))
            for _ in range(EXPERTS)
        )
        self.owned = range(EXPERTS)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.group is not None:
            # The tokens of all ranks come to the experts ...
            x = all_gather_tensor_autograd(x, 0, self.group)
            weights = all_gather_tensor_autograd(weights, 0, self.group)
        y = sum(weights[:, number, None] * self[number](x) for number in self.owned)
        if self.group is not None:
            # ... and what the experts add to them goes back.
            y = reduce_scatter_tensor_autograd(y, "sum", 0, self.group)
        return y


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        return self.head(x + self.experts(x, self.router(x).softmax(dim=-1)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(16, 5, generator=generator)
    return {"x": x, "label": (x[:, :3] + x[:, 2:]).argmax(dim=1)}


def owner_of(expert: int, world_size: int) -> int:
    return expert * world_size // EXPERTS


def step(model: MixtureOfExperts, shard: dict[str, Tensor], rank) -> dict[str, Tensor]:
    experts = model.experts
    experts.group = dist.group.WORLD
    experts.owned = [n for n in range(EXPERTS) if owner_of(n, rank.world_size) == rank.rank]
    # The experts have seen the tokens of all ranks: their gradients need no collective.
    fully_shard(model, ignored_params=set(experts.parameters()))
    loss(model, shard).backward()

    gradients = {}
    for name, parameter in model.named_parameters():
        if not name.startswith("experts."):
            gradients[name] = parameter.grad.full_tensor()
    for number, expert in enumerate(experts):
        for name, parameter in expert.named_parameters(prefix=f"experts.{number}"):
            owner = owner_of(number, rank.world_size)
            gradient = torch.zeros_like(parameter)
            if owner == rank.rank:
                gradient.copy_(parameter.grad)
            dist.broadcast(gradient, src=owner)
            gradients[name] = gradient
    return gradients


case = Case(model=MixtureOfExperts, batch=make_batch, loss=loss, layout="1x2")
