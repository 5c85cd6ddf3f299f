"""Every fault, planted in a real strategy on real ranks, is caught and named, and named once.

All layouts, models, losses and types are `ddp-equivalence faults --every`.
"""

from __future__ import annotations

import pytest
import torch

from ddp_equivalence import check
from ddp_equivalence.commands.faults.table import result_of
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import FaultTrial, fault_trials

LAYOUTS = ("1x2", "2x2", "1+3")


def _first_of_each() -> list[FaultTrial]:
    """Each fault in its first strategy, on its first pair: float64, float32 on one layout."""
    found: dict[tuple[str, str, torch.dtype | None], FaultTrial] = {}
    for one in fault_trials(layouts=LAYOUTS, every=False):
        case = one.trial.case
        if case.dtype is torch.float64 or case.layout == "2x2":
            found.setdefault((one.fault.name, case.layout, case.dtype), one)
    return list(found.values())


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(one, id=str(one), marks=pytest.mark.planted_fault(one.fault.name))
        for one in _first_of_each()
    ],
)
def test_a_planted_fault_is_caught_and_named(what: FaultTrial) -> None:
    with planted(what.fault.name):
        verdict = check(what.trial.case, what.trial.strategy, **what.trial.options)
    result = result_of(what, verdict)
    allowed = ("cannot_show",) if what.why_it_cannot_show else ("named", "among")
    assert result.outcome in allowed, f"{result.outcome}\n{verdict}"


@pytest.mark.self_check
def test_a_fault_that_cannot_show_is_no_pass() -> None:
    what = next(one for one in fault_trials(["sum_not_mean"], ["1x1"], every=False))
    with planted("sum_not_mean") as found:
        verdict = check(what.trial.case, what.trial.strategy)
    assert found.fired == 0  # it fires on the ranks, not here
    assert (verdict.outcome, "cannot show" in verdict.reason) == ("unknown", True), verdict


@pytest.mark.self_check
def test_a_fault_that_never_fires_is_no_pass() -> None:
    what = next(one for one in fault_trials(["only_last_micro_batch"], ["1x2"], every=False))
    with planted("only_last_micro_batch"):
        verdict = check(what.trial.case, "manual_all_reduce_mean")
    assert (verdict.outcome, "never came by" in verdict.reason) == ("unknown", True), verdict


@pytest.mark.self_check
def test_what_is_not_planted_is_not_broken() -> None:
    what = next(one for one in fault_trials(["sum_not_mean"], ["1x2"], every=False))
    with planted("sum_not_mean"):
        pass
    assert check(what.trial.case, what.trial.strategy).outcome == "same"


@pytest.mark.self_check
@pytest.mark.ddp(second_look=False)
def test_without_a_second_look_all_that_leave_the_same_numbers_are_named() -> None:
    what = next(one for one in fault_trials(["raw_module_called"], ["1x2"], every=False))
    with planted("raw_module_called"):
        verdict = check(what.trial.case, what.trial.strategy)
    assert verdict.observed == {}
    accepted = {one.cause for one in verdict.findings if one.accepted}
    assert {"no_all_reduce", "raw_module_called", "no_sync_left_on", "wrapper_dropped"} <= accepted


def test_every_cause_has_a_fault_and_every_fault_a_diagnosis() -> None:
    assert sorted(one.name for one in HYPOTHESES) == sorted(FAULTS)
