"""The big batch is given the random numbers that the ranks drew, so that only faults are left; and
a loss that is no mean over counts is not called one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, check
from ddp_equivalence.diagnosis import analysis, shares
from ddp_equivalence.measurement.draws import DrawReplay
from tests.combinations import each_once
from tests.diagnosis.names.drawing_models import (
    DRAWING,
    Centred,
    Device,
    FunctionalDropout,
    Layers,
    ModuleDropout,
    OneScaleForAll,
    another_device,
    keeps_the_last_micro_batch,
    leaves_out_rank_1,
    on_the_cpu,
    right,
    sums,
)
from tests.diagnosis.names.small_case import (
    Loss,
    average,
    by_hand,
    case,
    checked,
    report_of,
    under_ddp,
)
from tests.package.own_cases import build_model, make_batch
from tests.package.own_cases import loss as squares

pytestmark = pytest.mark.self_check

SAME = "the ranks' random numbers, the big batch is what they hold."
DIFFERENT = "With the ranks' random numbers, the big batch still differs."
UNKNOWN = "The big batch could not be given the random numbers of the ranks."


def told(verdict: Any) -> str:
    return " ".join(str(verdict).split())


@pytest.mark.parametrize(
    ("model", "loss", "device"), each_once(DRAWING, [on_the_cpu, another_device])
)
def test_whatever_draws_is_compared_with_the_numbers_that_the_ranks_drew(
    model: Any, loss: Loss, device: Device
) -> None:
    verdict = check(case("1x4", model=model, loss=loss), right(loss, device))
    assert (verdict.outcome, verdict.cause) == ("same", None), verdict
    assert verdict.numbers_are_known
    assert verdict.comparison is not None
    assert verdict.error is not None
    assert verdict.limit is not None
    assert verdict.error <= verdict.limit
    assert all(one.same for one in verdict.comparison.parameters)
    assert SAME in told(verdict)
    assert "Rank 0 drew at drawing_models.py:" in told(verdict)


@pytest.mark.parametrize(("model", "shared"), [(OneScaleForAll, True), (FunctionalDropout, False)])
def test_numbers_that_are_drawn_once_for_all_examples_of_a_rank_are_told(
    model: Any, shared: bool
) -> None:
    verdict = check(case("1x2", model=model), right(squares, on_the_cpu))
    assert verdict.outcome == "same", verdict
    assert ("drawn once for all examples of a rank, and differ" in told(verdict)) == shared


FAULTS = [
    (sums, "sum_not_mean", another_device),
    (leaves_out_rank_1, "rank_left_out", on_the_cpu),
    (keeps_the_last_micro_batch, "only_last_micro_batch", another_device),
]


@pytest.mark.parametrize(("model", "loss", "fault", "cause", "device"), each_once(DRAWING, FAULTS))
def test_random_numbers_excuse_no_fault(
    model: Any, loss: Loss, fault: Any, cause: str, device: Device
) -> None:
    verdict = check(case("1x2", model=model, loss=loss), fault(loss, device))
    assert verdict.causes == (cause,), verdict
    assert DIFFERENT in told(verdict)


class NormalisedDropout(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def changed(self, hidden: Tensor) -> Tensor:
        return F.dropout(self.norm(hidden), 0.3)


@pytest.mark.parametrize(
    ("changes", "cause", "device"),
    [
        ({"shards": "5+4+2+1"}, "uneven_shards_weighted_equally", on_the_cpu),
        ({"model": NormalisedDropout}, "batch_norm_local_statistics", another_device),
    ],
)
def test_random_numbers_excuse_no_shard(
    changes: dict[str, Any], cause: str, device: Device
) -> None:
    fields = {"model": FunctionalDropout} | changes
    verdict = check(case("1x4", **fields), right(squares, device))
    assert verdict.causes == (cause,), verdict
    assert DIFFERENT in told(verdict)


def reads_the_same_rows(model: nn.Module, batch: Any, rank: Rank) -> None:
    with another_device(rank):
        squares(model, {name: leaf[:3] for name, leaf in batch.items()}).backward()
    average(model, rank.world_size)


def test_ranks_that_draw_apart_for_the_same_rows_are_seen_to_read_the_same_rows() -> None:
    verdict = check(case("1x4", model=FunctionalDropout, shards="own"), reads_the_same_rows)
    assert verdict.causes == ("every_rank_same_data",), verdict


def another_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.l1_loss(model(batch["rows"]), batch["targets"])


def test_another_loss_is_shown_although_every_rank_draws_other_numbers() -> None:
    verdict = check(case("1x4", model=FunctionalDropout), right(another_loss, another_device))
    assert verdict.causes == (), verdict
    assert "the ranks' mean loss is" in told(verdict)


@pytest.mark.parametrize("changes", [{"dtype": torch.float32}, {"layout": "1x1"}])
def test_the_numbers_are_the_only_difference_in_other_cases(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"layout": "1x4", "model": FunctionalDropout} | changes
    verdict = check(case(**fields), right(squares, another_device))
    assert verdict.outcome == "same", verdict
    assert SAME in told(verdict)


class RandomSlopes(Layers):
    """What it draws depends on its input, so that it cannot be given to another forward pass."""

    def changed(self, hidden: Tensor) -> Tensor:
        return F.rrelu(hidden, training=True)


def test_numbers_that_cannot_be_given_to_the_big_batch_are_no_excuse_and_no_accusation() -> None:
    verdict = check(case("1x2", model=RandomSlopes), right(squares, another_device))
    assert verdict.causes == (), verdict
    assert not verdict.numbers_are_known
    assert UNKNOWN in told(verdict)


def test_a_check_without_a_difference_records_no_numbers(monkeypatch: Any) -> None:
    monkeypatch.setattr(analysis, "draws_of_the_big_batch", None)
    assert check(case("1x2"), by_hand(squares)).outcome == "same"


def test_without_a_second_run_nothing_is_said_of_numbers() -> None:
    verdict = checked(case("1x2", model=FunctionalDropout), right(squares, another_device), False)
    assert verdict.outcome == "different"
    assert "Rank 0 drew" not in report_of(verdict)


def test_no_step_is_excused_if_the_numbers_do_not_give_what_the_ranks_computed(
    monkeypatch: Any,
) -> None:
    def draws_by_itself(self: DrawReplay, name: str, result: object) -> None:
        self._next(name)

    monkeypatch.setattr(DrawReplay, "_drew", draws_by_itself)
    verdict = check(case("1x2", model=ModuleDropout), right(squares, another_device))
    assert verdict.causes == (), verdict
    assert not verdict.numbers_are_known


class WithoutSignal(FunctionalDropout):
    """One parameter has no elements, and one a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.unused = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(3))

    def changed(self, hidden: Tensor) -> Tensor:
        return super().changed(hidden) + self.empty.sum() + 0 * self.unused.sum()


def test_a_gradient_of_zero_is_no_difference_beside_the_numbers_of_the_ranks() -> None:
    verdict = check(case("1x2", model=WithoutSignal), right(squares, another_device))
    assert verdict.outcome == "same", verdict
    assert SAME in told(verdict)


@pytest.mark.parametrize(
    ("model", "outcome", "says"),
    [
        (ModuleDropout, "same", "Without dropout: this is how the step was compared"),
        (FunctionalDropout, "different", "the big batch is what they hold"),
    ],
)
def test_a_large_model_of_which_some_elements_are_kept_is_compared_without_dropout(
    model: Any, outcome: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "MAX_ELEMENTS", 20)
    monkeypatch.setattr(shares, "MAX_SELECTED", 60)
    verdict = check(case("1x2", model=model), right(squares, on_the_cpu))
    assert verdict.outcome == outcome, verdict
    assert says in told(verdict)


def test_the_random_numbers_of_several_steps_are_a_difference_that_is_named() -> None:
    verdict = check(case("1x2", model=FunctionalDropout), by_hand(squares), steps=2)
    assert verdict.causes == ("dropout_differs_from_reference",), verdict


class Normalised(Layers):
    """A batch norm that is written by hand."""

    def changed(self, hidden: Tensor) -> Tensor:
        return (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()


class WithBuffer(Layers):
    """A buffer follows the mean of the batch, and the forward pass uses it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def changed(self, hidden: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * hidden.detach().mean(0)
        return hidden - self.mean


def root_of_squares(model: nn.Module, batch: Any) -> Tensor:
    return squares(model, batch).sqrt()


def quantile(model: nn.Module, batch: Any) -> Tensor:
    return torch.quantile((model(batch["rows"]) - batch["targets"]).abs().mean(1), 0.7)


def median(model: nn.Module, batch: Any) -> Any:
    return (model(batch["rows"]) - batch["targets"]).abs().mean(1).median()


def with_ages(generator: torch.Generator) -> dict[str, Tensor]:
    """A leaf of the same length that the loss does not use."""
    return make_batch(generator) | {"age": torch.randint(1, 90, (12,), generator=generator)}


NOT_ADDITIVE: list[tuple[Any, Loss, Any]] = [
    *((model, squares, make_batch) for model in (Normalised, Centred, WithBuffer)),
    *((build_model, loss, make_batch) for loss in (root_of_squares, quantile, median)),
    (build_model, root_of_squares, with_ages),
]


@pytest.mark.parametrize(
    ("model", "loss", "batch", "layout", "reduced"),
    each_once(NOT_ADDITIVE, [("1x2", by_hand), ("1x4", under_ddp)]),
)
def test_a_loss_that_is_no_mean_over_counts_is_not_called_one(
    model: Any, loss: Loss, batch: Any, reduced: Any, layout: str
) -> None:
    verdict = check(case(layout, model=model, loss=loss, batch=batch), reduced(loss))
    wrong = {"token_counts_weighted_equally", "uneven_shards_weighted_equally"}
    assert verdict.outcome == "different"
    assert not (wrong | {"contrastive_local_negatives"}) & set(verdict.causes), verdict
