"""A sum of two means, as in object detection.

The loss of the classes is a mean over all examples, the loss of the boxes over positive examples.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence.case.losses.loss import Batch, CatalogueLoss, Normaliser
from ddp_equivalence.case.models.model import CatalogueModel


def value(model: nn.Module, batch: Batch) -> Tensor:
    outputs, targets = model(batch["inputs"]), batch["targets"]
    classes = F.cross_entropy(outputs, targets["labels"])
    positive = targets["positive"]
    return classes + F.mse_loss(outputs[positive, 0], targets["boxes"][positive])


def totals(model: nn.Module, outputs: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    targets = batch["targets"]
    chosen = outputs.gather(1, targets["labels"][:, None]).squeeze(1)
    distance = (outputs[:, 0] - targets["boxes"]) ** 2 * targets["positive"]
    return (outputs.logsumexp(dim=1) - chosen).sum(), distance.sum()


def normalisers(batch: Batch) -> tuple[Normaliser, ...]:
    targets = batch["targets"]
    return (
        Normaliser("mean", len(targets["labels"])),
        Normaliser("mean", int(targets["positive"].sum())),
    )


def targets(generator: torch.Generator, inputs: Tensor, model: CatalogueModel) -> dict[str, Tensor]:
    """A label and a box for every example; every third example is positive."""
    examples = len(inputs)
    return {
        "labels": torch.randint(model.output_size, (examples,), generator=generator),
        "boxes": torch.randn(examples, generator=generator),
        "positive": torch.arange(examples) % 3 == 0,
    }


LOSS = CatalogueLoss("two_normalisers", value, totals, normalisers, targets)
