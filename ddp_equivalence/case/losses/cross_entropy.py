"""Cross entropy over classes: the mean over examples, their sum, and a label-weighted mean."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser
from ddp_equivalence.case.models.model import CatalogueModel


def mean(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]), batch["targets"])


def total(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["inputs"]), batch["targets"], reduction="sum")


def label_weights(classes: int, like: Tensor) -> Tensor:
    """The weight of every class: 1, 2, 3, 1, 2, 3, ..."""
    return (torch.arange(classes, device=like.device) % 3 + 1).to(like.dtype)


def weighted_mean(model: nn.Module, batch: Batch) -> Tensor:
    """Torch divides by the sum of the labels' weights, not by the number of labels."""
    outputs = model(batch["inputs"])
    weight = label_weights(outputs.shape[-1], like=outputs)
    return F.cross_entropy(outputs, batch["targets"], weight=weight)


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    chosen = outputs.gather(1, batch["targets"][:, None]).squeeze(1)
    return ((outputs.logsumexp(dim=1) - chosen).sum(),)


def weighted_totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    chosen = outputs.gather(1, batch["targets"][:, None]).squeeze(1)
    weights = label_weights(outputs.shape[-1], like=outputs)[batch["targets"]]
    return ((weights * (outputs.logsumexp(dim=1) - chosen)).sum(),)


def labels(generator: torch.Generator, inputs: Tensor, model: CatalogueModel) -> Tensor:
    """Class numbers, shape (examples,)."""
    return torch.randint(model.output_size, (len(inputs),), generator=generator)


def divided_by_examples(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("mean", len(batch["targets"])),)


def divided_by_label_weights(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("mean", float((batch["targets"] % 3 + 1).sum())),)


def not_divided(batch: Batch) -> tuple[Normaliser, ...]:
    return (Normaliser("sum"),)


CROSS_ENTROPY_MEAN = CatalogueLoss(
    "cross_entropy_mean", mean, totals, divided_by_examples, labels, plain_mean=True
)
CROSS_ENTROPY_SUM = CatalogueLoss("cross_entropy_sum", total, totals, not_divided, labels)
LABEL_WEIGHTED_MEAN = CatalogueLoss(
    "label_weighted_mean", weighted_mean, weighted_totals, divided_by_label_weights, labels
)
