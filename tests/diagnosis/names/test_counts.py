"""Means over different counts are named where a count of the batch explains the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import check
from tests.combinations import each_once
from tests.diagnosis.names.small_case import Loss, by_hand, case, report_of, under_ddp
from tests.package.own_cases import EXAMPLES, make_batch

pytestmark = pytest.mark.self_check

TOKENS = 6


def with_labels(generator: torch.Generator, padding: int) -> dict[str, Tensor]:
    labels = torch.randint(1, 3, (EXAMPLES, TOKENS), generator=generator)
    for row in range(EXAMPLES):
        labels[row, 1 + row % 4 + row // 6 :] = padding
    return {"rows": torch.randn(EXAMPLES, TOKENS, 5, generator=generator), "labels": labels}


def padded(generator: torch.Generator) -> dict[str, Tensor]:
    return with_labels(generator, -100)


def without_tokens_in_the_second_half(generator: torch.Generator) -> dict[str, Tensor]:
    batch = padded(generator)
    batch["labels"][EXAMPLES // 2 :] = -100
    return batch


def token_mean(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["rows"]).flatten(0, 1), batch["labels"].flatten())


def safe_token_mean(model: nn.Module, batch: Any) -> Any:
    outputs, labels = model(batch["rows"]).flatten(0, 1), batch["labels"].flatten()
    total = F.cross_entropy(outputs, labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def with_weights(generator: torch.Generator) -> dict[str, Tensor]:
    return make_batch(generator) | {"weight": torch.rand(EXAMPLES, generator=generator)}


def weighted_mean(model: nn.Module, batch: Any) -> Any:
    errors = (model(batch["rows"]) - batch["targets"]).square().mean(1)
    return (errors * batch["weight"]).sum() / batch["weight"].sum()


def with_classes(generator: torch.Generator) -> dict[str, Tensor]:
    classes = torch.tensor([0, 0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1])
    return make_batch(generator) | {"classes": classes}


def mean_of_positives(model: nn.Module, batch: Any) -> Any:
    positive = batch["classes"] > 0
    errors = (model(batch["rows"]) - batch["targets"]).square().mean(1)
    return errors[positive].sum() / positive.sum()


def weighted_cross_entropy(model: nn.Module, batch: Any) -> Any:
    weight = torch.tensor([1.0, 5.0, 25.0], dtype=batch["rows"].dtype) / 3
    return F.cross_entropy(model(batch["rows"]), batch["classes"], weight=weight)


def weighted_by_place(model: nn.Module, batch: Any) -> Any:
    """The classes have no weights of their own: it is the rows that have."""
    weight = batch["rows"][:, 0].abs()
    errors = F.cross_entropy(model(batch["rows"]), batch["classes"], reduction="none")
    return (errors * weight).sum() / weight.sum()


COUNTED: list[tuple[Any, Loss, str]] = [
    (padded, token_mean, "elements of labels that are not -100"),
    (without_tokens_in_the_second_half, safe_token_mean, "elements of labels that are not -100"),
    (with_weights, weighted_mean, "the sum of weight"),
    (with_classes, mean_of_positives, "elements of classes above 0"),
    (
        with_classes,
        weighted_cross_entropy,
        "weights (1 : 5 : 25) of the classes 0, 1, 2 in classes",
    ),
]


@pytest.mark.parametrize(
    ("batch", "loss", "unit", "reduced", "layout"),
    each_once(
        COUNTED, [(by_hand, "1x2"), (under_ddp, "1x4"), (by_hand, "1x4"), (under_ddp, "1x2")]
    ),
)
def test_the_count_that_a_loss_divides_by_is_named(
    batch: Any, loss: Loss, unit: str, reduced: Any, layout: str
) -> None:
    verdict = check(case(layout, batch=batch, loss=loss), reduced(loss))
    assert verdict.causes == ("token_counts_weighted_equally",), verdict
    assert f"the loss divides by {unit}" in report_of(verdict)


def test_weights_of_classes_are_summed_in_the_fix() -> None:
    verdict = check(
        case(batch=with_classes, loss=weighted_cross_entropy), under_ddp(weighted_cross_entropy)
    )
    fix = "Fix: divide the summed loss by the sum of the weights of all ranks, and multiply it by 2"
    assert fix in report_of(verdict)


@pytest.mark.parametrize("layout", ["1x2", "1x4"])
def test_weights_of_rows_are_not_taken_for_those_of_classes(layout: str) -> None:
    loss = weighted_by_place
    verdict = check(case(layout, batch=with_classes, loss=loss), under_ddp(loss))
    assert verdict.outcome == "different"
    assert "of the classes" not in report_of(verdict)
