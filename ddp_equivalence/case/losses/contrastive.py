"""The InfoNCE loss: the negatives of each example are the other examples that the loss is given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.losses import mse
from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser

TEMPERATURE = 0.5


def value(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over examples. Source: CLIP, arXiv 2103.00020, figure 3."""
    similar, own = similarities(model(batch["inputs"]), batch["targets"])
    return (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """A shard's total has the shard's negatives only, which no divisor corrects."""
    similar, own = similarities(outputs, batch["targets"])
    of_outputs = F.cross_entropy(similar, own, reduction="sum")
    of_targets = F.cross_entropy(similar.T, own, reduction="sum")
    return ((of_outputs + of_targets) / 2,)


def similarities(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines divided by TEMPERATURE, of shape (examples, examples), and each example's number.

    The number is also the column of the example's own target, which is the right class.
    """
    cosines = F.normalize(outputs, dim=1) @ F.normalize(targets, dim=1).T
    return cosines / TEMPERATURE, torch.arange(len(outputs), device=outputs.device)


def divided_by_examples(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("mean", len(batch["targets"])),)


LOSS = CatalogueLoss(
    "contrastive",
    value,
    totals,
    divided_by_examples,
    mse.targets,
    batch_coupled="contrastive_local_negatives",
)
"""The targets are the embeddings that the outputs are compared with."""
