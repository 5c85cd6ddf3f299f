"""Why a comparison would show nothing. Each guard returns a reason, or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.nearest_fault import NearestFault
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.faults.plant import fault_of
from ddp_equivalence.measurement.on_rank import Evidence
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.reference import Reference
from ddp_equivalence.strategies.strategy import Strategy

CANNOT_SHOW = "it cannot show on this case"
"""Ends the reason of a planted fault that leaves the big batch's gradient there."""

EXCHANGES = ("reduce", "gather", "all_to_all", "send", "recv", "scatter")
"""Parts of the names of collectives that can carry a gradient to another rank."""


def against_the_reference(reference: Reference, compare: str) -> str | None:
    """A big batch without a usable gradient cannot be compared with."""
    values = [value for value in reference.expected.values() if value is not None]
    what = "update" if compare == "update" else "gradient"
    if any(not bool(value.to_dense().isfinite().all()) for value in values):
        return f"the big batch's own {what} is not finite"
    if all(not bool(value.to_dense().any()) for value in values):
        moved = "nothing moved" if compare == "update" else "every gradient is zero"
        return f"the big batch's own {what} is zero: {moved}"
    return None


def against_the_evidence(
    evidence: Mapping[int, Evidence], strategy: Strategy | None, expected: int
) -> str | None:
    """Every rank must have reported, on data of its own, with what was to be shown having run."""
    if len(evidence) != expected:
        return f"{len(evidence)} of {expected} ranks reported"
    if all(one is None for rank in evidence.values() for one in rank.gradients.values()):
        return (
            "the step left no gradient on any rank: leave them on the parameters of the model "
            "that you were given, or return {name: tensor} (an optimizer's zero_grad at the end "
            'of the step? then compare="update")'
        )
    if strategy is not None and strategy.one_process:
        replicas = evidence[0].notes.get("replicas", 0)
        if replicas < 2:
            return f"{strategy.name} did not really run: {replicas} replica, needs 2"
    return None


def against_an_idle_plant(
    evidence: Mapping[int, Evidence], fault: str, layout: Layout
) -> str | None:
    """A fault that never fired shows nothing."""
    if not fault or any(one.planted for one in evidence.values()):
        return None
    if (why := fault_of(fault).hidden(layout)) is not None:
        return f"{fault} was planted, but {why}: {CANNOT_SHOW}"
    return f"{fault} was planted, but the step never came by where it fires"


def against_a_hidden_plant(fault: str, layout: Layout) -> str | None:
    """A fault that fired and left the gradient of the big batch cannot show on this case."""
    if not fault:
        return None
    why = fault_of(fault).hidden(layout) or "left the gradient of the big batch"
    return f"{fault} was planted and fired, but {why}: {CANNOT_SHOW}"


def against_another_start(reference: Reference, evidence: Mapping[int, Evidence]) -> str | None:
    """A difference says nothing about the step if ranks and reference did not start alike."""
    other = [str(rank) for rank, one in evidence.items() if one.start != reference.start]
    if not other:
        return None
    return (
        f"ranks {', '.join(other)} build other weights than the reference: the model's builder "
        "must depend on the seed alone (torch's, numpy's and random's are set before the call)"
    )


def against_divergence(reference: Reference, step: int) -> str | None:
    """Where the big batch's own training diverges, rounding decides what comes after.

    ``step``: the first one that differs, of those that the reference took; all before were right.
    """
    losses = reference.losses[: step + 1]
    if len(losses) < 2 or not abs(losses[-1]) > DIVERGED * abs(losses[0]):
        return None
    return (
        f"the big batch's own training diverges (its loss is {losses[0]:.3g} before the first step "
        f"and {losses[-1]:.3g} before step {step + 1}, the first that differs), and there rounding "
        "decides: take a smaller learning rate, or fewer steps"
    )


DIVERGED = 100.0
"""A loss that grows by more than this in a few steps is no training."""


def against_a_pass(
    comparison: Comparison,
    evidence: Mapping[int, Evidence],
    nearest: Callable[[], NearestFault | None],
) -> str | None:
    """A green result must have been able to be red. ``nearest`` is asked only where it may matter:
    a fault that lies nearer than ``NEGLIGIBLE`` is none.
    """
    if not comparison.parameters or not comparison.elements:
        return "no gradient element was compared"
    if (same := _identical_inputs(evidence)) is not None:
        return same
    telling = [one for one in comparison.parameters if one.norm > 0 and not one.limit.only_rounding]
    if not telling:
        return "every gradient is zero but for rounding"
    useless = [one.name for one in telling if one.limit.is_useless]
    if useless:
        return (
            f"the limit lies above the signal for {', '.join(useless[:4])}: rounding alone, or "
            "randomness that the seed does not fix, moves the big batch's own gradient as far"
        )
    limit = min(one.limit.relative for one in telling)
    fault = nearest() if limit > NEGLIGIBLE else None
    if fault is not None and math.isfinite(fault.distance) and fault.distance < limit:
        return f"the limit lies above the signal: {fault.cause} would pass on this case"
    if len(evidence) > 1 and _nothing_exchanged(evidence, comparison.elements):
        return (
            "no collective ran on any rank: each computed the big batch by itself, so nothing "
            "was shown about training together"
        )
    return None


def _identical_inputs(evidence: Mapping[int, Evidence]) -> str | None:
    with_data = [one for one in evidence.values() if any(map(len, one.examples or ()))]
    if len(with_data) > 1 and len({one.data for one in with_data}) == 1:
        return (
            "all ranks were given identical inputs, so a missing all-reduce would not show: "
            "make a batch whose examples differ"
        )
    called = {one.inputs for one in evidence.values()}
    if len(evidence) > 1 and len(called) == 1 and None not in called:
        return (
            "the model was called with identical inputs on all ranks, so a missing all-reduce "
            "would not show: does every rank take its own examples (sampler)?"
        )
    return None


def _nothing_exchanged(evidence: Mapping[int, Evidence], elements: int) -> bool:
    """True if the flight recorder was there on every rank and saw no exchange of gradients.

    The constructor of DDP gathers one element, which exchanges nothing.
    """
    logs = [one.collectives for one in evidence.values()]
    seen = [log for log in logs if log is not None]
    return len(seen) == len(logs) and not any(
        one.op == FORGOTTEN or (name in one.op and one.elements >= min(2, elements))
        for log in seen
        for one in log
        for name in EXCHANGES
    )
