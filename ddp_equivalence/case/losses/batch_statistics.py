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
    """WEIGHT times the mean square of 1 minus the variance of each output over the batch.

    VICReg (arXiv 2105.04906, equation 1) has a hinge in place of the square. The hinge has no
    gradient where the variance is above 1, so that a fault could not show there.
    """
    return WEIGHT * (1 - outputs.var(dim=0, unbiased=False)).square().mean()


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """A shard's penalty has the variance of the shard only, which no divisor corrects."""
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
