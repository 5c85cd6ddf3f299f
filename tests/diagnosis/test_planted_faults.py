"""Every fault that is planted in a real strategy on real ranks is caught and named.

`ddp-equivalence faults --every` plants them on all layouts, models, losses and types.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from ddp_equivalence import SuiteBug, check
from ddp_equivalence.commands.planting import result_of
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.faults import FAULTS, faults_in
from ddp_equivalence.faults.fault import Fault
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import FaultTrial, fault_trials

LAYOUTS = ("1x2", "2x2", "1+3")


def _first_of_each() -> list[FaultTrial]:
    """Each fault in its first strategy and case: float64 on all layouts, float32 on one."""
    first: dict[tuple[str, str, torch.dtype | None], FaultTrial] = {}
    for fault_trial in fault_trials(layouts=LAYOUTS, every=False):
        case = fault_trial.trial.case
        if case.dtype is torch.float64 or case.layout == "2x2":
            first.setdefault((fault_trial.fault.name, case.layout, case.dtype), fault_trial)
    return list(first.values())


@pytest.mark.parametrize(
    "fault_trial",
    [
        pytest.param(
            fault_trial,
            id=str(fault_trial),
            marks=pytest.mark.planted_fault(fault_trial.fault.name),
        )
        for fault_trial in _first_of_each()
    ],
)
def test_a_planted_fault_is_caught_and_named(fault_trial: FaultTrial) -> None:
    with planted(fault_trial.fault.name):
        verdict = check(
            fault_trial.trial.case, fault_trial.trial.strategy, **fault_trial.trial.options
        )
    outcome = result_of(fault_trial, verdict).outcome
    allowed = ("cannot_show",) if fault_trial.why_it_cannot_show else ("named", "among")
    assert outcome in allowed, f"{outcome}\n{verdict}"


@pytest.mark.self_check
def test_a_fault_that_cannot_show_is_no_pass() -> None:
    fault_trial = next(iter(fault_trials(["sum_not_mean"], ["1x1"], every=False)))
    with planted("sum_not_mean") as plant:
        verdict = check(fault_trial.trial.case, fault_trial.trial.strategy)
    assert plant.fired == 0  # it fires on the ranks, not here
    assert (verdict.outcome, "cannot show" in verdict.reason) == ("unknown", True), str(verdict)


@pytest.mark.self_check
def test_a_fault_that_never_fires_is_no_pass() -> None:
    fault_trial = next(iter(fault_trials(["only_last_micro_batch"], ["1x2"], every=False)))
    with planted("only_last_micro_batch"):
        verdict = check(fault_trial.trial.case, "manual_all_reduce_mean")
    assert (verdict.outcome, "never reached" in verdict.reason) == ("unknown", True), str(verdict)


@pytest.mark.self_check
def test_what_is_not_planted_is_not_broken() -> None:
    fault_trial = next(iter(fault_trials(["sum_not_mean"], ["1x2"], every=False)))
    with planted("sum_not_mean"):
        pass
    assert check(fault_trial.trial.case, fault_trial.trial.strategy).outcome == "same"


@pytest.mark.self_check
@pytest.mark.ddp(second_look=False)
def test_without_a_second_look_all_that_leave_the_same_numbers_are_named() -> None:
    fault_trial = next(iter(fault_trials(["raw_module_called"], ["1x2"], every=False)))
    with planted("raw_module_called"):
        verdict = check(fault_trial.trial.case, fault_trial.trial.strategy)
    assert verdict.observed == {}
    accepted = {one.cause for one in verdict.findings if one.accepted}
    assert {"no_all_reduce", "raw_module_called", "no_sync_left_on", "wrapper_dropped"} <= accepted
    # The first of several causes is not named alone, and a fault may be a second one of its cause.
    first = str(verdict.cause)
    for fault in (FAULTS[first], replace(FAULTS["sum_not_mean"], cause=first)):
        result = result_of(replace(fault_trial, fault=fault), verdict)
        assert (result.fault, result.outcome) == (fault.name, "among")


WITHOUT = {"optimizer_built_before_sharding"}
"""The suite itself steps what a strategy leaves; tests/diagnosis/fixes has a program of this."""


def test_every_cause_has_a_fault_and_every_fault_a_diagnosis() -> None:
    assert {one.name for one in HYPOTHESES} - WITHOUT == {one.cause for one in FAULTS.values()}


def test_two_faults_of_one_name_are_an_error_that_names_both_places() -> None:
    first, second = ModuleType("faults.one"), ModuleType("faults.other")
    first.FIRST = second.SHARED = Fault("sum_not_mean", "One.")  # type: ignore[attr-defined]
    assert list(faults_in([first, second])) == ["sum_not_mean"]
    second.SECOND = Fault("sum_not_mean", "Another.")  # type: ignore[attr-defined]
    with pytest.raises(SuiteBug, match=r"faults\.one\.FIRST and faults\.other\.SECOND"):
        faults_in([first, second])
