"""The state after a step: buffers, collectives in flight, and weights that never moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_equivalence.case.build import build_model, cast_model, put_state
from ddp_equivalence.case.case import no_loss
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.training import GradientKey, Training
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.hypothesis import ranks_by_number
from ddp_equivalence.diagnosis.lines.words import last_of, names_text
from ddp_equivalence.diagnosis.setting import PointedLine, calls_of_all_steps
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.measurement.measure import Measurement
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.reference import in_dtype, train

# Asks whether the state that a right step leaves gives the next step another gradient.
#
# Codebooks, centres and moving averages are no parameters: no gradient reaches them, and each
# rank moves them by its own rows, unless the step reduces them. The gradients of the step itself
# are then right, and those of the next one are not.

BUFFERS_DIFFER = "buffers_differ_from_big_batch"

REDUCE = "reduce what changes {} over all ranks, so that each rank keeps what the big batch would."
AS_OFTEN = (
    "change {} as often as the big batch does, which is once for a step, and by all its rows."
)

MATTERS = 1e-9
"""Gradients are others if they differ by more than this, relative to their norm."""


def state_that_matters(expected: Expected, measured: Measurement) -> tuple[BufferBeside, ...]:
    """The state that is not that of the big batch on some rank, if the big batch has another
    gradient with it than with its own; () otherwise, where the gradients of this step differ, or
    where that cannot be computed.
    """
    reference, evidence = expected.reference, measured.evidence
    if not measured.comparison.same or reference.at_each_step:
        return ()
    beside = buffers_beside(reference.buffers, evidence)
    if not beside or reference.case.loss is no_loss:
        return ()
    try:
        right = _gradients(expected, reference.buffers)
        for rank in dict.fromkeys(one.ranks[0] for one in beside):
            held = {one.name: evidence[rank].buffers_left[one.name] for one in beside}
            if _differ(_gradients(expected, {**reference.buffers, **held}), right):
                return beside
    except (BadCase, RuntimeError):  # the state of a rank does not fit, such as rows that it keeps
        return ()
    return ()


def _gradients(expected: Expected, state: Mapping[str, Tensor]) -> dict[GradientKey, Tensor | None]:
    """Those of the first big batch, for a model with this state."""
    reference, dtype = expected.reference, expected.reference.computed_in
    model = build_model(reference.case)
    model = model if dtype is None else cast_model(model, dtype)
    put_state(model, state)
    batch = in_dtype(expected.batches()[0], dtype)
    return train(reference.case, model, [batch], "gradients", Training())[0]


def _differ(
    some: Mapping[GradientKey, Tensor | None], others: Mapping[GradientKey, Tensor | None]
) -> bool:
    for key, one in some.items():
        other = others[key]
        if one is None or other is None:
            if one is not other:
                return True
        elif float((one - other).norm()) > MATTERS * float(other.norm()):
            return True
    return False


def finding_of_state(
    beside: Sequence[BufferBeside],
    evidence: Mapping[int, Evidence],
    seen: Mapping[int, Observation],
) -> Finding:
    """The finding that a step leaves this state, and has right gradients. ``evidence``: of the
    ranks; without any, each rank is taken to have changed the state by its own rows.
    """
    changed = [one.name for one in beside]
    names = names_text(changed)
    held = [{name: one.buffers.get(name) for name in changed} for one in evidence.values()]
    apart = not held or any(one != held[0] for one in held)
    by_whom = " by the rank's own rows" if apart else ""
    return Finding(
        cause=BUFFERS_DIFFER,
        sentence="The gradients of the step are right, and the state that it leaves is not that of "
        "the big batch: buffers, or tensors that modules keep. The next gradient depends on them.",
        look_at="the lines that change this state: how often they run, and by which rows",
        accepted=True,
        fits=True,
        detail=f"these are off, relative to their norms: {text_of_buffers(beside)}",
        because="the ranks hold different values of it afterwards" if apart and held else "",
        headline=f"{names}, which the next step reads, {'is' if len(beside) == 1 else 'are'} not "
        "what the big batch leaves",
        fix=(REDUCE if apart else AS_OFTEN).format(names),
        lines=tuple(
            last_of(
                calls_of_all_steps(seen).places(
                    Kind.BUFFERS, where=lambda call: bool(set(changed) & set(call.names))
                ),
                f"changes {names}{by_whom}",
            )
        ),
    )


# Compares the buffers that the ranks are left with, such as running statistics, with those of the
# big batch. They are no gradients: another value there is a property of the model, and no fault.

MOST_ROUNDINGS = 1e3
"""So many times the precision of its dtype a buffer may be off, relative to its norm."""


@dataclass(frozen=True)
class BufferBeside:
    """A buffer that is not what one big batch leaves.

    ``error``: ||held - big batch|| / ||big batch|| on the rank where it is largest. ``ranks``: on
    which it is not the same.
    """

    name: str
    error: float
    ranks: tuple[int, ...]


def buffers_beside(
    expected: Mapping[str, Tensor], evidence: Mapping[int, Evidence]
) -> tuple[BufferBeside, ...]:
    """The buffers that differ from those of the big batch, in the order of the model."""
    found = []
    for name, right in expected.items():
        held = ((rank, one.buffers_left.get(name)) for rank, one in evidence.items())
        errors = {
            rank: error
            for rank, value in held
            if value is not None and (error := error_of(value, right)) > 0
        }
        if errors:
            found.append(BufferBeside(name, max(errors.values()), tuple(errors)))
    return tuple(found)


def error_of(held: Tensor, right: Tensor) -> float:
    """How far a buffer is off, relative to the right one's norm; 0 if that is only rounding."""
    if held.shape != right.shape:
        return float("inf")
    is_float = held.is_floating_point()
    wide = torch.float64 if not (held.is_complex() or right.is_complex()) else torch.complex128
    difference, norm = float((held.to(wide) - right.to(wide)).norm()), float(right.to(wide).norm())
    error = difference / norm if norm else difference
    rounding = MOST_ROUNDINGS * torch.finfo(held.dtype).eps if is_float else 0.0
    return error if error > rounding else 0.0


def text_of_buffers(found: Iterable[BufferBeside]) -> str:
    """The names and errors, such as ``1.running_mean by 3.1e-01``."""
    return ", ".join(f"{one.name} by {text_of(one.error, '.1e')}" for one in found)


CAUSE = "collective_not_waited_for"

SENTENCE = "The step returned before a collective that it had issued was known to be complete."

LOOK_AT = (
    "the call with async_op=True: it returns a handle, and handle.wait() must be called before the "
    "gradient is read"
)

CONSEQUENCES = frozenset(
    (
        *("no_all_reduce", "parameters_reduced_not_gradients", "parameter_not_reduced"),
        *("bucket_not_reduced", "reduced_before_backward_finished"),
    )
)
"""Causes that leave the same numbers as a collective whose result comes too late."""

MOST_LINES = 2


def against_a_race(evidence: Mapping[int, Evidence], comparison: Comparison) -> Unknown | None:
    """Gradients that were right show nothing if they could have been read too early."""
    seen = _seen(evidence, comparison)
    if not seen:
        return None
    return Unknown(
        UnknownBecause.COLLECTIVE_NOT_WAITED_FOR,
        f"the gradients were right this time, but {seen}. Look at {LOOK_AT}",
    )


def with_race(
    findings: Sequence[Finding], evidence: Mapping[int, Evidence], comparison: Comparison
) -> tuple[Finding, ...]:
    """The findings, and a race before them if one was seen.

    If other causes explain the numbers, all are named.
    """
    seen = _seen(evidence, comparison)
    if not seen:
        return tuple(findings)
    best = findings[0] if findings and findings[0].accepted else None
    race = Finding(
        cause=CAUSE,
        sentence=SENTENCE,
        look_at=LOOK_AT,
        accepted=True,
        fits=True,
        because=seen,
        headline="a collective is not waited for",
        fix="call wait() on the handle of this collective before the gradient is read.",
        lines=_lines_of_missed_waits(evidence, comparison),
        tell_apart="Wait for every handle: this difference then goes away.",
    )
    if best is not None and CONSEQUENCES.isdisjoint(best.causes):
        race = replace(
            race,
            detail=best.detail,
            unexplained=best.unexplained,
            more=(replace(best, more=()), *best.more),
        )
    return race, *(replace(finding, accepted=False) for finding in findings)


def _seen(evidence: Mapping[int, Evidence], comparison: Comparison) -> str:
    """What was seen of a race on the ranks, as a clause; "" if nothing was."""
    return "; and ".join((*_never_waited_for(evidence, comparison), *_changed_later(evidence)))


def _lines_of_missed_waits(
    evidence: Mapping[int, Evidence], comparison: Comparison
) -> tuple[PointedLine, ...]:
    """The lines that issued collectives which nobody waited for, each once."""
    found: dict[CodeLine, str] = {}
    for one in evidence.values():
        for missed in one.missed_waits:
            path, number, function = missed.place
            if path and missed.elements >= comparison.fewest_exchanged:
                found.setdefault(CodeLine(path, number, function), missed.op)
    return tuple(
        PointedLine(line, f"{op}: the step returned before it was complete", True, "handle.wait()")
        for line, op in list(found.items())[:MOST_LINES]
    )


def _never_waited_for(evidence: Mapping[int, Evidence], comparison: Comparison) -> Iterator[str]:
    """Collectives that are large enough to exchange gradients."""
    fewest = comparison.fewest_exchanged
    ranks_by_collective: dict[str, list[int]] = {}
    for rank, one in evidence.items():
        large = [str(missed) for missed in one.missed_waits if missed.elements >= fewest]
        for collective in dict.fromkeys(large):
            ranks_by_collective.setdefault(collective, []).append(rank)
    if ranks_by_collective:
        ranks = sorted({rank for found in ranks_by_collective.values() for rank in found})
        yield f"{ranks_by_number(ranks)} never waited for {names_text(list(ranks_by_collective))}"


def _changed_later(evidence: Mapping[int, Evidence]) -> Iterator[str]:
    ranks = [rank for rank, one in evidence.items() if one.changed_later]
    if ranks:
        names = dict.fromkeys(name for one in evidence.values() for name in one.changed_later)
        yield (
            f"on {ranks_by_number(ranks)} these gradients changed after the step had returned: "
            f"{names_text(list(names))}"
        )


NO_OPTIMIZER_STEP = "no_optimizer_step"


def no_optimizer_step(
    request: Request,
    comparison: Comparison,
    evidence: Mapping[int, Evidence],
    observed: Mapping[int, Observation],
) -> Finding | None:
    """The finding if no optimizer stepped in a step that trains, and no weight moved; else None."""
    if not request.trains or any(one.optimizer_steps for one in evidence.values()):
        return None
    if comparison.structure or not comparison.parameters:
        return None
    if any(error.ratio != 0 for one in comparison.parameters for error in one.by_rank):
        return None
    went_backward = [one for one in observed.values() if one.backwards]
    ran = f"backward ran {len(went_backward[0].backwards)} x, and " if went_backward else ""
    return Finding(
        cause=NO_OPTIMIZER_STEP,
        sentence="No optimizer steps, so the weights are what they were before.",
        look_at="where optimizer.step() is called: a condition that is never true, an accelerator "
        "or scaler that skips it, or an optimizer that holds other parameters",
        unexplained=0.0,
        accepted=True,
        fits=True,
        because=f"{ran}no optimizer of torch stepped on any rank; no weight moved",
        headline="no optimizer steps, so no weight moves",
        fix="call optimizer.step() after backward, on the parameters of the model that is given.",
        lines=tuple(
            last_of(
                calls_of_all_steps(observed).backwards,
                "no optimizer steps after it",
                True,
                "optimizer.step()",
            )
        ),
    )
