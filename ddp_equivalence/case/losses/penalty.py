"""Mean squared error plus an L2 penalty on the weights, which belongs in the loss once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence.case.losses import mse
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser

WEIGHT = 0.125


def penalty(model: nn.Module) -> Tensor:
    """WEIGHT times the sum of all squared parameters. It does not depend on the data."""
    return (
        WEIGHT * torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
    )


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return mse.mean(model, batch) + penalty(model)


def total(model: nn.Module, batch: Batch) -> Tensor:
    return mse.total(model, batch) + penalty(model)


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    return (*mse.totals(model, outputs, batch), penalty(model))


def mean_and_once(batch: Batch) -> tuple[Normaliser, ...]:
    return (*mse.divided_by_elements(batch), Normaliser("once"))


def sum_and_once(batch: Batch) -> tuple[Normaliser, ...]:
    return (*mse.not_divided(batch), Normaliser("once"))


MEAN_WITH_PENALTY = CatalogueLoss(
    "mse_mean_l2_penalty",
    mean,
    totals,
    mean_and_once,
    mse.targets,
    uses_all_parameters=True,
)
SUM_WITH_PENALTY = CatalogueLoss(
    "mse_sum_l2_penalty",
    total,
    totals,
    sum_and_once,
    mse.targets,
    uses_all_parameters=True,
)
