"""Mean squared error plus a penalty on the variance of the outputs over the batch, as in VICReg."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.losses import mse
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser

WEIGHT = 0.25


def value(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch["inputs"])
    return F.mse_loss(outputs, batch["targets"]) + penalty(outputs)


def penalty(outputs: Tensor) -> Tensor:
    """WEIGHT times how far the variance of every output, over the batch, is from 1.

    Squared, where VICReg (arXiv 2105.04906, equation 1) has a hinge: that has no gradient beyond.
    """
    return WEIGHT * (1 - outputs.var(dim=0, unbiased=False)).square().mean()


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """Of one part of a batch, the penalty has the variance of that part: no divisor mends it."""
    return (*mse.totals(model, outputs, batch), len(outputs) * penalty(outputs))


def normalisers(batch: Batch) -> tuple[Normaliser, ...]:
    return (*mse.divided_by_elements(batch), Normaliser("mean", len(batch["targets"])))


LOSS = CatalogueLoss(
    "batch_statistics",
    value,
    totals,
    normalisers,
    mse.targets,
    batch_coupled="batch_statistics_local",
)
