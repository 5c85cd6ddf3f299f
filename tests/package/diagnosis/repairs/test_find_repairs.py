"""Which edits of a step are tried first, when none is tried, and which count as repairs."""

from __future__ import annotations

import ast
import linecache
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, Verdict, check
from ddp_equivalence.case import settings
from ddp_equivalence.diagnosis.repairs import find_repairs as module
from ddp_equivalence.diagnosis.repairs.edits import Edit
from ddp_equivalence.diagnosis.repairs.find_repairs import (
    Repairs,
    find_repairs,
    in_general,
    in_order,
    leaves_the_big_batch,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.view import expected_of, lines_of_the_big_batch
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.edited_code import EditedCode
from ddp_equivalence.measurement.observer import LocalsSeen
from ddp_equivalence.measurement.request import Request, read_request
from ddp_equivalence.measurement.trials import Tried
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.combinations import one_of_each
from tests.package.own_cases import build_model, own_case


def shared_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def step(model: nn.Module, shard: Any, rank: Rank) -> None:
    shared_loss(model, shard).backward()
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size + number - number * rank.rank


def line_with(text: str) -> int:
    lines = linecache.getlines(__file__)
    return next(number for number, line in enumerate(lines, 1) if text in line)


def edit_of(before: str, after: str) -> Edit:
    """The edit that replaces the first such text of this file."""
    source = Path(__file__).read_text("utf-8")
    trees = (ast.parse(source).body, ast.parse(source.replace(before, after, 1)).body)
    one, other = next(
        pair for pair in zip(*trees, strict=True) if ast.dump(pair[0]) != ast.dump(pair[1])
    )
    code = EditedCode(__file__, ast.Module([one], []), ast.Module([other], []))
    return Edit(line_with(before), 0, before, after, code)


def request_of() -> Request:
    case = own_case(loss=shared_loss, dtype=torch.float64)
    return read_request(case, step, {"backend": "gloo"})


@pytest.fixture(autouse=True)
def nothing_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier tests of this process have taken nothing of the time that it may spend."""
    monkeypatch.setattr(module, "_spent", 0.0)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each search for repairs, which finds nothing."""
    seconds: list[float] = []

    def nothing(*arguments: Any) -> Tried:
        seconds.append(arguments[-2])
        return Tried()

    monkeypatch.setattr(module, "try_edits", nothing)
    return seconds


def repairs_of(request: Request, time: TimeLeft | None = None, of_check: float = 10.0) -> Repairs:
    with settings.using(settings.replaced(trial_seconds=of_check)):
        return find_repairs(request, expected_of(request), tuple, time or TimeLeft())


def test_half_of_what_is_left_may_be_used_and_six_checks_in_a_process(
    tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    repairs_of(request_of())
    repairs_of(request_of(), TimeLeft(6.0))
    monkeypatch.setattr(module, "_spent", 55.0)
    repairs_of(request_of())
    of_trials = 1 - module.PART_TO_VERIFY
    most = [10.0, 3.0, 5.0]
    assert tried == pytest.approx([of_trials * seconds for seconds in most], abs=0.5)
    monkeypatch.setattr(module, "_spent", 60.0)
    assert repairs_of(request_of()).why_not == module.ALL_SPENT


@pytest.mark.parametrize(
    ("request_", "seconds"),
    [
        (lambda: replace(request_of(), in_process=True), 10.0),
        (lambda: replace(request_of(), second_look=False), 10.0),
        (lambda: read_request(own_case(), "ddp_mean", {"backend": "gloo"}), 10.0),
        (lambda: request_of(), 0.0),
    ],
    ids=["in this process", "without a second look", "a strategy", "in no seconds"],
)
def test_some_checks_try_no_edits(request_: Any, seconds: float, tried: list[float]) -> None:
    assert repairs_of(request_(), of_check=seconds) == Repairs()
    assert tried == []


def test_it_is_said_that_nothing_could_be_edited(tried: list[float]) -> None:
    assert repairs_of(request_of()).why_not == module.NOTHING_TO_EDIT


def test_a_batch_that_is_another_one_at_each_call_is_a_reason(tried: list[float]) -> None:
    request = request_of()
    request = replace(request, case=replace(request.case, batch=_another_each_time))
    assert "another one at the second call" in repairs_of(request).why_not
    assert tried == []


def _another_each_time(generator: torch.Generator) -> dict[str, Tensor]:
    _numbers.append(len(_numbers))
    return {"rows": torch.full((12, 5), float(len(_numbers))), "targets": torch.ones(12, 3)}


_numbers: list[int] = []


def test_the_lines_that_compute_the_big_batch_are_known() -> None:
    lines = lines_of_the_big_batch(request_of().case)[__file__]
    assert line_with("return F.mse_loss") in lines
    assert line_with("parameter.grad /= rank") not in lines


def test_lines_that_the_report_points_at_come_first_and_shared_ones_last() -> None:
    pointed_at, other = line_with("parameter.grad /= rank"), line_with("shared_loss(model, shard)")
    shared = line_with("return F.mse_loss")
    seen = LocalsSeen({__file__: {pointed_at, other, shared}})
    pointed = [PointedLine(CodeLine(__file__, pointed_at, "step"), "", is_fault=True)]
    edits = in_order({__file__: {shared}}, seen, pointed)
    assert edits[0].line == pointed_at
    of_lines = [{e.place: edits.index(e) for e in edits if e.line == n} for n in (other, shared)]
    places = of_lines[0].keys() & of_lines[1].keys()
    assert places
    assert all(of_lines[0][place] < of_lines[1][place] for place in places)


@pytest.mark.parametrize(
    ("before", "after", "leaves"),
    [
        ('batch["targets"]', 'batch["rows"][:, :3]', False),
        ("F.mse_loss", "F.l1_loss", False),
        ("F.mse_loss", "no_such_name", False),
        ("parameter.grad /= rank.world_size", "parameter.grad /= 7", True),
    ],
)
def test_an_edit_must_leave_the_big_batch_as_it_is(before: str, after: str, leaves: bool) -> None:
    edit, request = edit_of(before, after), request_of()
    assert leaves_the_big_batch(request, expected_of(request), edit) is leaves
    assert shared_loss(build_model(), {"rows": torch.ones(1, 5), "targets": torch.ones(1, 3)}) > 0


def judged(step: Any, case: dict[str, Any], **options: Any) -> Verdict:
    fields: dict[str, Any] = {"loss": shared_loss, "dtype": torch.float64} | case
    with settings.using(settings.replaced(trial_seconds=15.0)):
        return check(own_case(**fields), step, **options)


def updates(model: nn.Module, shard: Any, rank: Rank) -> None:
    shared_loss(model, shard).backward()
    for number, parameter in enumerate(model.parameters()):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.1 * parameter.grad / (rank.world_size + number * rank.rank)


@pytest.mark.parametrize(
    ("step", "case", "options"),
    one_of_each(
        lambda row: row[0],
        [
            (step, {"dtype": torch.float32, "layout": "2x2"}, {}),
            (step, {}, {}),
            (updates, {}, {"compare": "update"}),
        ],
    ),
)
def test_a_repair_is_found(
    step: Any, case: dict[str, Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = judged(step, case, **options)
    assert verdict.outcome == "different"
    assert verdict.repairs.found, verdict.full_report()
    lines = [linecache.getline(one.line.file, one.line.number) for one in verdict.repairs.found]
    assert any("rank.world_size + number" in line for line in lines), lines
    assert len(lines) == len(set(lines))  # one for each line
    assert len(str(verdict).splitlines()) <= 16


def starts_late(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Reads too few examples, and would be right if each rank read all of them."""
    size = 12 // rank.world_size
    first = rank.rank * size + rank.rank - 1
    step_of_mean(model, {name: one[max(first, 0) : first + size] for name, one in batch.items()})


def step_of_mean(model: nn.Module, shard: Any) -> None:
    shared_loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def scaled_by_hand(model: nn.Module, shard: Any, rank: Rank) -> None:
    step_of_mean(model, shard)
    norm = sum(one.grad.square().sum() for one in model.parameters() if one.grad is not None) ** 0.5
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.1 / norm)


def test_an_edit_counts_only_if_it_repairs_another_layout_as_well() -> None:
    """If each rank reads the whole batch, nothing of the step is right in general."""
    before = "one[max(first, 0) : first + size]"
    hides, repairs = "one", "one[rank.rank * size : rank.rank * size + size]"
    case = own_case(loss=shared_loss, dtype=torch.float64, shards="own")
    request = read_request(case, starts_late, {})
    edits = [edit_of(before, hides), edit_of(before, repairs)]
    until = time.monotonic() + 60.0
    assert in_general(request, expected_of(request), edits, until) == edits[1:]


def test_no_edits_of_a_step_that_changes_right_gradients_on_purpose_are_tried(
    tried: list[float],
) -> None:
    verdict = judged(scaled_by_hand, {})
    assert verdict.outcome == "different"
    assert not tried, str(verdict)


@pytest.mark.usefixtures("as_if_alone")
def test_a_check_that_passes_starts_no_more_ranks() -> None:
    from tests.package.own_cases import right_step

    assert judged(right_step, {}).outcome == "same"
    before = warm_ranks().started
    verdict = judged(right_step, {})
    assert verdict.outcome == "same"
    assert verdict.repairs == Repairs()
    assert warm_ranks().started == before
