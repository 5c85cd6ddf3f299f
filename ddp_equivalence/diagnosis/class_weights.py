"""The weights of classes that a loss divides by, as ``nn.CrossEntropyLoss(weight=...)`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import leaves_of, name_of_leaf
from ddp_equivalence.case.losses.token_mean import PADDING
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.divisors import is_weighted_mean
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.strategies.sharded_batch import Indices

MOST_CLASSES = 12
"""The gradient of every class is computed alone, so that more of them would take long."""

MOST_SHOWN = 4

ONLY_ONE = 1e-6
"""The weights are determined if the second smallest eigenvalue is at least this, relative to the
largest: with the smallest one, rounding leaves about 1e-16."""


@dataclass(frozen=True)
class ClassWeights:
    """``name``: of the leaf of the batch that says each example's class. ``labels``: the class of
    each example. ``weights``: of each class, the smallest being 1: no gradient shows their scale.
    """

    name: str
    labels: tuple[int, ...]
    weights: dict[int, float]

    def sum_of(self, examples: Indices) -> float:
        """What the loss of these examples divides by."""
        return sum(self.weights.get(self.labels[index], 0.0) for index in examples)

    @property
    def text(self) -> str:
        """In words, with the classes in their order."""
        shown = list(islice(self.weights.items(), MOST_SHOWN))
        more = ", ..." if len(shown) < len(self.weights) else ""
        classes = ", ".join(str(label) for label, _ in shown)
        weights = " : ".join(text_of(weight, ".4g") for _, weight in shown)
        return f"weights ({weights}{more}) of the classes {classes}{more} in {self.name}"


def class_weights(view: View, parts: Sequence[Indices]) -> ClassWeights | None:
    """The weights with which the classes of the big batch, and its parts, make its gradient.

    None if there are none, or they are not determined, or are no weights because they are negative.
    That they fit is no accident: every element of the gradient is an equation for a few of them,
    and that the parts are weighted by their sums is another one.
    """
    setting = view.setting
    if setting.has_batch_norm or setting.batch_coupled or view.examples.draws_random_numbers:
        return None  # then the gradient of a part is not what it is in the big batch
    for name, labels in _labels(view):
        weights = _solved(view, labels)
        if weights is None:
            continue
        found = ClassWeights(name, labels, weights)
        if is_weighted_mean(view, parts, [found.sum_of(part) for part in parts]):
            return found
    return None


def _labels(view: View) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The leaves that hold a whole number for each example, with some of them more than once."""
    count = view.setting.example_count
    for path, leaf in leaves_of(view.setting.batch):
        if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex():
            continue
        if leaf.numel() != count or leaf.shape[:1] != (count,):
            continue
        labels = tuple(leaf.flatten().tolist())
        if 1 < len(set(labels) - {PADDING}) <= min(MOST_CLASSES, count - 1):
            yield name_of_leaf(path), labels


def _solved(view: View, labels: tuple[int, ...]) -> dict[int, float] | None:
    """The weights for which the gradients of the classes, each a mean, make that of the batch."""
    classes = sorted(set(labels) - {PADDING})
    examples = [tuple(i for i, own in enumerate(labels) if own == label) for label in classes]
    means = [view.examples.gradient(of_class) for of_class in examples]
    if not all(bool(mean.isfinite().all()) for mean in means):
        return None
    away = [len(own) * (mean - view.expected) for own, mean in zip(examples, means, strict=True)]
    inner = [[float(one @ other) for other in away] for one in away]
    values, vectors = torch.linalg.eigh(torch.tensor(inner, dtype=torch.float64))
    if float(values[1]) < ONLY_ONE * float(values[-1]):
        return None
    weights = vectors[:, 0] / vectors[:, 0].sum()
    if float(weights.min()) <= 0:
        return None
    sums = [float(weight) * len(own) for weight, own in zip(weights, examples, strict=True)]
    mixed = sum((one * mean for one, mean in zip(sums, means, strict=True)), start=means[0] * 0)
    if not nearly_equal(view.expected, mixed / sum(sums)):
        return None
    least = float(weights.min())
    return {label: float(one) / least for label, one in zip(classes, weights, strict=True)}
