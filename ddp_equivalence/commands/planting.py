"""Plants faults in trials, and writes the results as a table with one row for each fault."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from torch import nn

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.checking.check import check
from ddp_equivalence.diagnosis.unknown import UnknownBecause
from ddp_equivalence.faults.plant import planted
from ddp_equivalence.faults.trials import FaultTrial
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.ranks import Rank
from ddp_equivalence.report.text import aligned
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies.manual_all_reduce import reduce_gradients

Outcome = Literal["named", "among", "misnamed", "missed", "cannot_show", "never_fired"]
"""The result of planting a fault, in a word.

If the suite found a difference, it accepted the cause of the fault alone ("named"), as one of
several ("among"), or not at all ("misnamed"). If the suite found no difference, then the
fault cannot show in this trial, and the verdict says so ("cannot_show"); or the fault never did its
damage ("never_fired"); or it did, and the suite did not notice ("missed").
"""


@dataclass(frozen=True)
class FaultResult:
    """The result of one trial with a planted fault.

    ``causes`` are the causes that the diagnosis accepted. ``distance`` is the error of the worst
    parameter, in multiples of its limit. ``checked`` says what was checked, so that the trial can
    be repeated.
    """

    fault: str
    outcome: Outcome
    causes: tuple[str, ...]
    distance: float
    seconds: float
    checked: str = ""

    @property
    def as_expected(self) -> bool:
        """True if the fault was caught and named, or if it cannot show in this trial."""
        return self.outcome in ("named", "among", "cannot_show")


def run_fault_trials(fault_trials: Sequence[FaultTrial]) -> Iterator[FaultResult]:
    """Plant the fault of each trial in turn, and check its case."""
    for fault_trial in fault_trials:
        trial = fault_trial.trial
        with planted(fault_trial.fault.name):
            verdict = check(trial.case, trial.strategy, **trial.options)
        yield result_of(fault_trial, verdict)


def result_of(fault_trial: FaultTrial, verdict: Verdict) -> FaultResult:
    """Say whether the verdict caught the planted fault, and under which name."""
    cause, because, distance = fault_trial.fault.cause, verdict.unknown_because, 0.0
    causes = tuple(name for one in verdict.findings if one.accepted for name in one.causes)
    outcome: Outcome = "missed"
    if verdict.outcome == "different":
        distance = (verdict.error or 0.0) / verdict.limit if verdict.limit else 0.0
        outcome = "named" if causes == (cause,) else "among" if cause in causes else "misnamed"
    elif fault_trial.why_it_cannot_show and because is UnknownBecause.PLANTED_FAULT_CANNOT_SHOW:
        outcome = "cannot_show"
    elif because is UnknownBecause.PLANTED_FAULT_NEVER_FIRED:
        outcome = "never_fired"
    checked = f"{verdict.subject} on {fault_trial.trial.case}"
    return FaultResult(fault_trial.fault.name, outcome, causes, distance, verdict.seconds, checked)


HEAD = (
    *("planted", "shows", "caught", "named", "among rivals", "cannot show", "line right"),
    "nearest limits",
)


def table_lines(results: Sequence[FaultResult], lines: Mapping[str, bool]) -> Iterator[str]:
    """The table, with one row for each fault, and below it the results that are not as expected.

    ``lines``: for each fault that was planted in a step of one's own too, whether the report
    pointed at the line at which it acts.
    The columns "shows" to "cannot show" count trials. "nearest limits" is the smallest error of a
    caught fault, in multiples of its limit.
    """
    rows: list[Sequence[object]] = [HEAD]
    for name in dict.fromkeys(result.fault for result in results):
        of_fault = [result for result in results if result.fault == name]
        rows.append(_row(name, of_fault, {True: "yes", False: "no", None: "-"}[lines.get(name)]))
    rows.append(_row("all", results, f"{sum(lines.values())} of {len(lines)}"))
    yield from aligned(rows, gap=3)
    slowest = max((result.seconds for result in results), default=0.0)
    yield f"slowest from the call to the verdict: {slowest:.1f} s"
    for result in results:
        if not result.as_expected:
            outcome = result.outcome.replace("_", " ").upper()
            called = f", called {', '.join(result.causes)}" if result.causes else ""
            yield f"{outcome}: {result.fault} in {result.checked}{called}"
    for name, is_right in lines.items():
        if not is_right:
            yield f"LINE NOT RIGHT: {name} in a step of one's own"


def _row(title: str, results: Sequence[FaultResult], line_right: str) -> Sequence[object]:
    counts = Counter(result.outcome for result in results)
    caught = [result for result in results if result.outcome in ("named", "among", "misnamed")]
    nearest = min((result.distance for result in caught), default=0.0)
    return (
        *(title, len(results) - counts["cannot_show"], len(caught)),
        *(counts["named"], counts["among"], counts["cannot_show"], line_right, f"{nearest:.1e}"),
    )


# The smallest faults that are still caught: a factor on all gradients, and one wrong element.

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DELTAS = [2.0**exponent for exponent in range(-52, 1)]
"""The sizes of faults that are tried."""

MODEL, LOSS, LAYOUT = "mlp", "mse_mean", "2x2"


def sensitivity_lines() -> Iterator[str]:
    """For each dtype, the smallest faults that are caught, on the catalogue's MLP.

    Each is a power of two, or inf if even a fault of size 1 is missed: how far a factor on all
    gradients is from 1, and the error of one element, relative to the root mean square of its
    parameter's gradient.
    """
    yield f"{'dtype':<10}{'factor 1 +':>14}{'one element':>14}   (smallest caught, powers of two)"
    for dtype in DTYPES:
        factor, element = _smallest(dtype, off_by_a_factor), _smallest(dtype, one_element)
        yield f"{str(dtype).removeprefix('torch.'):<10}{factor:>14.1e}{element:>14.1e}"


def off_by_a_factor(delta: float) -> Step:
    """A step that leaves 1 + delta times the right gradients."""
    return _changed(lambda gradient: gradient.mul_(1 + delta))


def one_element(delta: float) -> Step:
    """A step that leaves right gradients, except for one element of each matrix.

    The error of that element is delta times the root mean square of the matrix.
    """

    def change(gradient: torch.Tensor) -> None:
        if gradient.ndim == 2:
            gradient[1, 2] += delta * gradient.square().mean().sqrt()

    return _changed(change)


def _changed(change: Callable[[torch.Tensor], Any]) -> Step:
    def step(model: nn.Module, shard: Any, rank: Rank) -> None:
        LOSSES[LOSS](model, shard).backward()
        reduce_gradients(model, rank.world_size)
        for parameter in model.parameters():
            if parameter.grad is not None:
                change(parameter.grad)

    return step


def _smallest(dtype: torch.dtype, make_step: Callable[[float], Step]) -> float:
    """The smallest delta that is caught.

    Bisection finds it; this assumes that every delta is caught that is larger than a caught one.
    """
    case = Case(model=MODEL, loss=LOSS, layout=LAYOUT, dtype=dtype)

    def is_caught(delta: float) -> bool:
        return check(case, make_step(delta)).outcome == "different"

    place = bisect_left(DELTAS, True, key=is_caught)
    return DELTAS[place] if place < len(DELTAS) else inf
