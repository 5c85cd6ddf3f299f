"""Squared error: the mean over all elements of the targets, and the sum over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser
from ddp_equivalence.case.models.model import CatalogueModel


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["targets"])


def total(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["inputs"]), batch["targets"], reduction="sum")


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    return (((outputs - batch["targets"]) ** 2).sum(),)


def targets(generator: torch.Generator, inputs: Tensor, model: CatalogueModel) -> Tensor:
    """Standard normal, shape (examples, output size)."""
    return torch.randn(len(inputs), model.output_size, generator=generator)


def divided_by_elements(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("mean", batch["targets"].numel()),)


def not_divided(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("sum"),)


MSE_MEAN = CatalogueLoss("mse_mean", mean, totals, divided_by_elements, targets, plain_mean=True)
MSE_SUM = CatalogueLoss("mse_sum", total, totals, not_divided, targets)
