"""Gradients were added over the ranks and divided by a number that is not theirs."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import averaged_twice, divided_by_local_world_size
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, WrongFactor
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_divisor
from ddp_equivalence.diagnosis.setting import PointedLine, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call

WHOLE = 1e-4
"""A divisor is a whole number if it is as near as this, relative to itself."""


def wrong_divisor(view: View) -> int | None:
    """The number that every rank was seen to divide by; None if it is the right one, or unknown.

    A number that other causes explain is left to them.
    """
    if view.parts.add_up_to_the_big_batch:
        return None
    by_rank = [
        {_divisor(call) for call in view.observed.calls.of(rank)} - {None}
        for rank in view.observed.by_rank
    ]
    divisors = set.intersection(*by_rank) if by_rank else set()
    if len(divisors) != 1 or not _all_ranks_add_up(view):
        return None
    divisor = divisors.pop()
    if divisor is None or divisor == view.world_size:
        return None
    others = (*averaged_twice.factors(view), *divided_by_local_world_size.factors(view))
    factor = view.world_size / divisor
    return None if any(abs(one.value / factor - 1) < WHOLE for one in others) else divisor


def _divisor(call: Call) -> int | None:
    """The whole number that this call divided gradients by; None if it did not."""
    factor = call.change.factor if call.change is not None else None
    if factor is None or not 0 < factor < 1:
        return None
    number = round(1 / factor)
    return number if abs(1 / factor - number) < WHOLE * number else None


def _all_ranks_add_up(view: View) -> bool:
    """True if gradients were added up over all ranks, and nothing else was done with them."""
    reduced = [
        call.collective
        for rank in view.observed.by_rank
        for call in view.observed.calls.of(rank)
        if reduces_gradients(call)
    ]
    return bool(reduced) and all(
        one is not None and one.reduce_op == "SUM" and len(one.ranks) == view.world_size
        for one in reduced
    )


def factors(view: View) -> Sequence[WrongFactor]:
    """The number of ranks, divided by the number that was seen."""
    divisor = wrong_divisor(view)
    if divisor is None:
        return ()
    detail = f"divided by {divisor}, where there are {view.world_size} ranks"
    return (WrongFactor(view.world_size / divisor, detail),)


def indication(view: View) -> Indication | None:
    """Looks for a line that divides gradients by one number on every rank."""
    divisor = wrong_divisor(view)
    if divisor is None:
        return None
    return Indication(True, f"every rank divided its gradients by {divisor}")


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are divided."""
    divisor = wrong_divisor(view)
    places = view.observed.calls.multiplied_by(1 / divisor) if divisor else []
    note = f"divides by {divisor}; there are {view.world_size} ranks"
    return [
        *(place.pointed() for place in view.observed.calls.reductions[:1]),
        *(place.pointed(note, is_fault=True) for place in places[:1]),
        *(
            line
            for place in places[:1]
            for line in lines_of_divisor(view, place.ranks[0], place.line)
        ),
    ]


def fix(view: View) -> str:
    """Divide by the world size."""
    return f"divide by {view.world_size}, which is dist.get_world_size()."


HYPOTHESIS = Hypothesis(
    name="divided_by_wrong_number",
    sentence="Gradients were added over all ranks and divided by a number that is not the number "
    "of ranks.",
    look_at="where the divisor comes from: a configuration or an environment variable of another "
    "run; use dist.get_world_size() instead",
    factors=factors,
    indication=indication,
    tell_apart="Use another world size: the factor changes with it.",
    headline="gradients are divided by another number",
    lines=lines,
    fix=fix,
)
