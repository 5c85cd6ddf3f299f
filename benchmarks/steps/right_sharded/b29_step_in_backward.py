"""The optimizer steps inside of the backward pass, one small optimizer for each sharded parameter.

fully_shard calls the hooks of a parameter once its gradient is reduced, so that no gradient has to
outlive its own step. Many of the parameters have fewer rows than there are ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_equivalence import Case, Rank

STEPS, ROWS = 3, 12
SETTINGS = {"lr": 0.2, "momentum": 0.7, "weight_decay": 0.02}


class Expert(nn.Module):
    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.inward = nn.Linear(size, hidden)
        self.outward = nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.outward(self.inward(x).relu())


class SoftMixture(nn.Module):
    """All experts see all rows, and the router weighs what they say."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList([Expert(6, hidden) for hidden in (2, 3, 9)])
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        said = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.last(x + (said * weights[:, None]).sum(-1)).squeeze(-1)


class FusedSteps:
    """``fused.install(model)`` is all: there is no ``step`` and no ``zero_grad`` to call."""

    def __init__(self) -> None:
        self.optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
        self.taken = 0

    def install(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            self.optimizers[parameter] = torch.optim.SGD([parameter], **SETTINGS)
            parameter.register_post_accumulate_grad_hook(self.take_step)

    def take_step(self, parameter: nn.Parameter) -> None:
        optimizer = self.optimizers[parameter]
        optimizer.step()
        optimizer.zero_grad()
        self.taken += 1


def make_optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **SETTINGS)


def rows(generator: torch.Generator) -> dict[str, Tensor]:
    x = torch.randn(STEPS * ROWS, 6, generator=generator)
    return {"x": x, "y": torch.where(x[:, 0] > 0, x[:, 1], x[:, 2] * x[:, 3])}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.smooth_l1_loss(model(batch["x"]), batch["y"])


def step(model: SoftMixture, batch: dict[str, Tensor], rank: Rank) -> None:
    for expert in model.experts:
        fully_shard(expert)
    fully_shard(model)
    fused = FusedSteps()
    fused.install(model)
    each = ROWS // rank.world_size
    for number in range(STEPS):
        begin = number * ROWS + rank.rank * each
        loss(model, {name: part[begin : begin + each] for name, part in batch.items()}).backward()
    assert fused.taken == STEPS * len(fused.optimizers)


case = Case(model=SoftMixture, batch=rows, loss=loss, layout="1x4", shards="own")
options = {"compare": "update", "optimizer": make_optimizer, "steps": STEPS}
