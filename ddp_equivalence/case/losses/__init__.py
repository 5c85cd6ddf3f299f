"""The losses of the catalogue. A new loss is one file here and one line in ``LOSSES``."""

from __future__ import annotations

from ddp_equivalence.case.losses import (
    batch_statistics,
    contrastive,
    cross_entropy,
    mse,
    penalty,
    root_mean_square,
    token_mean,
    two_normalisers,
)
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser

__all__ = ["LOSSES", "Batch", "CatalogueLoss", "Normaliser"]

LOSSES: dict[str, CatalogueLoss] = {
    loss.name: loss
    for loss in (
        mse.MSE_MEAN,
        mse.MSE_SUM,
        cross_entropy.CROSS_ENTROPY_MEAN,
        cross_entropy.CROSS_ENTROPY_SUM,
        cross_entropy.LABEL_WEIGHTED_MEAN,
        token_mean.TOKEN_MEAN,
        token_mean.TOKEN_SUM,
        two_normalisers.LOSS,
        penalty.MEAN_WITH_PENALTY,
        penalty.SUM_WITH_PENALTY,
        contrastive.LOSS,
        batch_statistics.LOSS,
        root_mean_square.LOSS,
    )
}
