"""Guards against vacuous checks: each returns why a comparison would show nothing, or None."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.diagnosis.nearest_fault import NearestFault
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.faults.plant import fault_named
from ddp_equivalence.measurement.work import Evidence
from ddp_equivalence.ranks.collectives import FORGOTTEN
from ddp_equivalence.reference import Reference
from ddp_equivalence.strategies.strategy import Strategy

EXCHANGES = ("reduce", "gather", "all_to_all", "send", "recv", "scatter")
"""Parts of the names of collectives that can carry a gradient to another rank."""

DIVERGED = 100.0
"""A loss that grows by more than this factor in a few steps shows that training diverges."""


def against_the_reference(reference: Reference) -> Unknown | None:
    """A big batch without a usable gradient cannot be compared with."""
    values = [value for value in reference.expected.values() if value is not None]
    what = "update" if reference.compare == "update" else "gradient"
    if any(not bool(value.to_dense().isfinite().all()) for value in values):
        return Unknown(
            UnknownBecause.REFERENCE_NOT_FINITE, f"the big batch's own {what} is not finite"
        )
    if all(not bool(value.to_dense().any()) for value in values):
        moved = "nothing moved" if reference.compare == "update" else "every gradient is zero"
        return Unknown(
            UnknownBecause.REFERENCE_IS_ZERO, f"the big batch's own {what} is zero: {moved}"
        )
    return None


def against_the_evidence(
    evidence: Mapping[int, Evidence], strategy: Strategy | None, expected: int
) -> Unknown | None:
    """Each of the ``expected`` ranks must have reported, and the strategy must really have run."""
    if len(evidence) != expected:
        return Unknown(
            UnknownBecause.RANK_DID_NOT_REPORT, f"{len(evidence)} of {expected} ranks reported"
        )
    if all(one is None for rank in evidence.values() for one in rank.gradients.values()):
        return Unknown(
            UnknownBecause.NO_GRADIENT_LEFT,
            "the step left no gradient on any rank: leave them on the parameters of the model "
            "that you were given, or return {name: tensor} (an optimizer's zero_grad at the end "
            'of the step? then compare="update")',
        )
    if strategy is not None and strategy.one_process:
        replicas = evidence[0].notes.get("replicas", 0)
        if replicas < 2:
            return Unknown(
                UnknownBecause.STRATEGY_DID_NOT_RUN,
                f"{strategy.name} did not really run: {replicas} replica, needs 2",
            )
    return None


def against_an_idle_plant(
    evidence: Mapping[int, Evidence], fault: str, layout: Layout
) -> Unknown | None:
    """A planted fault that never did its damage shows nothing."""
    if not fault or any(one.planted for one in evidence.values()):
        return None
    if (why := fault_named(fault).why_it_cannot_show(layout)) is not None:
        return _cannot_show(f"{fault} was planted, but {why}")
    return Unknown(
        UnknownBecause.PLANTED_FAULT_NEVER_FIRED,
        f"{fault} was planted, but the step never came by where it fires",
    )


def against_a_hidden_plant(fault: str, layout: Layout) -> Unknown | None:
    """A planted fault that did its damage, and yet left the gradient of the big batch."""
    if not fault:
        return None
    why = fault_named(fault).why_it_cannot_show(layout) or "left the gradient of the big batch"
    return _cannot_show(f"{fault} was planted and fired, but {why}")


def _cannot_show(why: str) -> Unknown:
    return Unknown(UnknownBecause.PLANTED_FAULT_CANNOT_SHOW, f"{why}: it cannot show on this case")


def against_another_start(reference: Reference, evidence: Mapping[int, Evidence]) -> Unknown | None:
    """A difference says nothing about the step if ranks and reference did not start alike."""
    start = digest(dict(build_model(reference.case).named_parameters()))
    other = [str(rank) for rank, one in evidence.items() if one.start != start]
    if not other:
        return None
    return Unknown(
        UnknownBecause.RANKS_BUILD_OTHER_WEIGHTS,
        f"ranks {', '.join(other)} build other weights than the reference: the model's builder "
        "must depend on the seed alone (torch's, numpy's and random's are set before the call)",
    )


def against_divergence(reference: Reference, step: int) -> Unknown | None:
    """Where the big batch's own training diverges, rounding decides what comes after.

    ``step`` is the first step that differs; all steps before it were right.
    """
    losses = reference.losses[: step + 1]
    if len(losses) < 2 or not abs(losses[-1]) > DIVERGED * abs(losses[0]):
        return None
    return Unknown(
        UnknownBecause.REFERENCE_DIVERGES,
        f"the big batch's own training diverges (its loss is {losses[0]:.3g} before the first step "
        f"and {losses[-1]:.3g} before step {step + 1}, the first that differs), and there rounding "
        "decides: take a smaller learning rate, or fewer steps",
    )


def against_a_pass(
    comparison: Comparison,
    evidence: Mapping[int, Evidence],
    nearest: Callable[[], NearestFault | None],
) -> Unknown | None:
    """A result that is the same must have been able to differ.

    ``nearest`` computes the known fault that lies nearest to the big batch. It is called only where
    a limit is wide enough for a fault to pass: a fault nearer than ``NEGLIGIBLE`` counts as none.
    """
    if not comparison.parameters or not comparison.elements:
        return Unknown(UnknownBecause.NOTHING_TO_COMPARE, "no gradient element was compared")
    if (identical := _identical_inputs(evidence)) is not None:
        return Unknown(UnknownBecause.IDENTICAL_INPUTS, identical)
    telling = [one for one in comparison.parameters if one.norm > 0 and not one.limit.only_rounding]
    if not telling:
        return Unknown(UnknownBecause.ONLY_ROUNDING, "every gradient is zero but for rounding")
    useless = [one.name for one in telling if one.limit.is_useless]
    if useless:
        return Unknown(
            UnknownBecause.LIMIT_ABOVE_SIGNAL,
            f"the limit lies above the signal for {', '.join(useless[:4])}: rounding alone, or "
            "randomness that the seed does not fix, moves the big batch's own gradient as far",
        )
    limit = min(one.limit.relative for one in telling)
    fault = nearest() if limit > NEGLIGIBLE else None
    if fault is not None and math.isfinite(fault.distance) and fault.distance < limit:
        return Unknown(
            UnknownBecause.LIMIT_ABOVE_SIGNAL,
            f"the limit lies above the signal: {fault.cause} would pass on this case",
        )
    if len(evidence) > 1 and _nothing_exchanged(evidence, comparison.elements):
        return Unknown(
            UnknownBecause.NOTHING_EXCHANGED,
            "no collective ran on any rank: each computed the big batch by itself, so nothing "
            "was shown about training together",
        )
    return None


def _identical_inputs(evidence: Mapping[int, Evidence]) -> str | None:
    """Why a missing all-reduce would not show, because all ranks were given the same."""
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

    The constructor of DDP gathers one element, which exchanges no gradient.
    """
    logs = [one.collectives for one in evidence.values()]
    seen = [log for log in logs if log is not None]
    return len(seen) == len(logs) and not any(
        one.op == FORGOTTEN or (name in one.op and one.elements >= min(2, elements))
        for log in seen
        for one in log
        for name in EXCHANGES
    )
