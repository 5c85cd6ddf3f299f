"""A penalty on the weights, which every rank adds up over the shards that it holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ddp_equivalence import Case

STRENGTH = 0.05


class Survival(nn.Module):
    """Predicts a rate."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.CELU(), nn.Linear(16, 16), nn.CELU())
        self.rate = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rate(self.trunk(x)).squeeze(-1)


def local_part(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def penalty(model: nn.Module) -> Tensor:
    """Elastic net."""
    parts = [local_part(p) for p in model.parameters() if p.requires_grad]
    return STRENGTH * sum(part.abs().sum() + part.square().sum() / 2 for part in parts)


def data_term(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.poisson_nll_loss(model(batch["covariates"]), batch["events"])


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return data_term(model, batch) + penalty(model)


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    covariates = torch.randn(24, 8, generator=generator)
    events = torch.poisson(covariates[:, 0].exp(), generator=generator)
    return {"covariates": covariates, "events": events}


class PenalisedStep:
    def __init__(self, model: Survival, world_size: int) -> None:
        self.world_size = world_size
        fully_shard(model.trunk)
        self.model = fully_shard(model)

    def backward(self, batch: dict[str, Tensor]) -> None:
        data_term(self.model, batch).backward()
        # The root still has its whole weights after the backward pass, if it was not resharded.
        self.model.reshard()
        self.model.trunk.reshard()
        # All ranks add the penalty, so each of them adds its share of it.
        (penalty(self.model) / self.world_size).backward()


def step(model: Survival, shard: dict[str, Tensor], rank) -> None:
    PenalisedStep(model, rank.world_size).backward(shard)


case = Case(model=Survival, batch=make_batch, loss=loss, layout="1x2")
