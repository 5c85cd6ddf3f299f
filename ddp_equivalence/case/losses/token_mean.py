"""Cross entropy: the mean over all tokens that are not padding, and the sum over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser
from ddp_equivalence.case.models.model import CatalogueModel

PADDING = -100
"""The target of padded tokens; torch's own default for ``ignore_index``."""


def mean(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=PADDING)


def total(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["inputs"])
    return F.cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=PADDING, reduction="sum"
    )


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    valid = batch["targets"] != PADDING
    labels = batch["targets"].clamp(min=0)
    chosen = outputs.gather(2, labels[..., None]).squeeze(2)
    return (((outputs.logsumexp(dim=2) - chosen) * valid).sum(),)


def padded_targets(generator: torch.Generator, inputs: Tensor, model: CatalogueModel) -> Tensor:
    """Random labels of the inputs' shape.

    Example i keeps its first 1 + (4 i mod length) tokens; the others are padding.
    """
    examples, length = inputs.shape
    targets = torch.randint(model.output_size, inputs.shape, generator=generator)
    kept = 1 + 4 * torch.arange(examples) % length
    return targets.masked_fill(torch.arange(length) >= kept[:, None], PADDING)


def divided_by_tokens(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("mean", int((batch["targets"] != PADDING).sum())),)


def not_divided(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("sum"),)


TOKEN_MEAN = CatalogueLoss(
    "token_mean", mean, totals, divided_by_tokens, padded_targets, output="tokens"
)
TOKEN_SUM = CatalogueLoss("token_sum", total, totals, not_divided, padded_targets, output="tokens")
