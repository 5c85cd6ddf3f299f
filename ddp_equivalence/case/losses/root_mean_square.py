"""The root of the mean squared error: no mean over examples, though its square is one."""

from __future__ import annotations

from torch import Tensor, nn

from ddp_equivalence.case.losses import mse
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser


def value(model: nn.Module, batch: Batch) -> Tensor:
    return mse.mean(model, batch).sqrt()


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """A shard's root is that of the shard only, which no divisor corrects."""
    errors = (outputs - batch["targets"]).square()
    if not len(errors):
        return (errors.sum(),)
    return (len(errors) * errors.mean().sqrt(),)


def normalisers(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("mean", len(batch["targets"])),)


LOSS = CatalogueLoss(
    "root_mean_square",
    value,
    totals,
    normalisers,
    mse.targets,
    batch_coupled="statistic_not_additive",
)
