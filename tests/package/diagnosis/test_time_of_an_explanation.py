"""Explaining a difference costs one gradient for each set of examples, and ends with the case."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, Verdict, check
from ddp_equivalence.diagnosis import example_gradients, time_left
from ddp_equivalence.diagnosis.example_gradients import loss_and_gradient_of
from ddp_equivalence.diagnosis.time_left import OutOfTime, TimeLeft
from tests.package.own_cases import loss, own_case

LAYERS = 6


def six_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(LAYERS - 1)), nn.Linear(5, 3))


def noise_on_every_gradient(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad += torch.randn_like(parameter.grad)


Gradients = Counter[tuple[float, ...]]
"""The examples of a gradient, by the sum of each row -> how often the gradient was computed."""


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Gradients:
    counted: Gradients = Counter()
    compute: Callable[..., Any] = loss_and_gradient_of

    def counting(case: Any, batch: dict[str, Tensor], *more: Any) -> Any:
        counted[tuple(batch["rows"].sum(1).tolist())] += 1
        return compute(case, batch, *more)

    monkeypatch.setattr(example_gradients, "loss_and_gradient_of", counting)
    return counted


class Clock:
    """A clock on which a gradient of few examples takes ``seconds``, and nothing else any time."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = time.monotonic(), seconds  # the check reads the real one too

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def slow_gradients(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Every gradient takes 9 of the 60 s of a case."""
    clock = Clock(9.0)
    compute: Callable[..., Any] = loss_and_gradient_of

    def slow(case: Any, batch: dict[str, Tensor], *more: Any) -> Any:
        clock.now += clock.seconds * min(1, len(batch["rows"]))
        return compute(case, batch, *more)

    monkeypatch.setattr(time_left, "time", clock)
    monkeypatch.setattr(example_gradients, "loss_and_gradient_of", slow)
    return clock


def checked(step: Any) -> Verdict:
    return check(own_case(model=six_layers), step)


def test_no_gradient_is_computed_twice(computed: Gradients) -> None:
    verdict = checked(noise_on_every_gradient)
    assert "no known cause fits" in verdict.full_report()
    assert len(computed) > 12
    assert max(computed.values()) == 1


def test_what_there_was_no_time_for_is_said_and_the_verdict_stands(slow_gradients: Clock) -> None:
    began = slow_gradients.now
    verdict = checked(noise_on_every_gradient)
    report = " ".join(verdict.full_report().split())
    assert verdict.outcome == "different"
    assert "Explained only in part: the deadline of 60 s left no time for: " in report
    assert "shares by example" in report.partition("left no time for")[2]
    assert verdict.shares is None or verdict.shares.pieces == "ranks"
    assert slow_gradients.now - began <= 60
    verdict.full_report()  # nor does a second report compute more
    assert slow_gradients.now - began <= 60


def test_no_known_cause_fits_is_not_said_if_not_all_were_tried(slow_gradients: Clock) -> None:
    slow_gradients.seconds = 31.0
    verdict = checked(noise_on_every_gradient)
    assert verdict.cause is None
    assert "no known cause fits" not in verdict.full_report()
    assert "not all known causes were tried" in verdict.full_report()


def test_a_long_explanation_says_how_far_it_is(slow_gradients: Clock) -> None:
    lines: list[str] = []
    slow_gradients.seconds = 1.5
    with time_left.progress_shown_by(lines.append):
        checked(noise_on_every_gradient).full_report()
    assert len(lines) > 3
    assert all(line.startswith("explaining the difference: ") for line in lines)
    assert any("shares by example, " in line and " of 12 examples (" in line for line in lines)


def test_a_short_explanation_shows_no_progress(slow_gradients: Clock) -> None:
    lines: list[str] = []
    slow_gradients.seconds = 0.0
    with time_left.progress_shown_by(lines.append):
        checked(noise_on_every_gradient).full_report()
    assert lines == []


def test_a_debugged_step_has_no_deadline_for_its_explanation(slow_gradients: Clock) -> None:
    slow_gradients.seconds = 100.0
    verdict = check(own_case(model=six_layers), noise_on_every_gradient, in_process=True)
    assert verdict.not_tried == ()
    assert verdict.why_no_shares is not None
    assert "no weights of" in verdict.why_no_shares.reason  # noise is none


def reads_other_rows(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Right on one rank: its operations are held against those of one rank."""
    ddp = DistributedDataParallel(model)
    (loss(ddp, shard) * shard["rows"].flip(0)[:, :1].mean().exp()).backward()


def has_another_loss(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Wrong on one rank too: its operations are held against the loss of the case."""
    ddp = DistributedDataParallel(model)
    (ddp(shard["rows"]) - shard["targets"].sort(1).values).square().mean().backward()


POSITIONS = 8


@pytest.mark.parametrize(
    "step", [noise_on_every_gradient, reads_other_rows, has_another_loss, lambda *given: None]
)
def test_time_may_end_before_any_computation(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    last = float("inf")

    def require(left: TimeLeft, seconds: float = 0.0) -> None:
        nonlocal asked
        asked += 1
        if asked > last:
            raise OutOfTime

    monkeypatch.setattr(TimeLeft, "require", require)
    outcome, most = checked(step).outcome, asked
    for position in range(POSITIONS):
        asked, last = 0, most * position // POSITIONS
        verdict = checked(step)
        assert verdict.outcome == outcome
        assert str(verdict)
        assert verdict.full_report()
