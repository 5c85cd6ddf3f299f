"""One term of the loss has a wrong weight: the parameters that only it reaches show that."""

from __future__ import annotations

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.pieces import Pieces
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named
from ddp_equivalence.measurement.calls import Call, Kind

EQUAL = 1e-6

FEWEST = 4
"""Fewer elements may be any multiple by chance."""

MOST_TERM_LINES = 2


def fault_of_a_term(pieces: Pieces, uniform: float) -> Whereabouts | None:
    """Says which lines compute a term of the loss that counts a wrong number of times.

    ``uniform``: every rank holds this many times what all ranks computed together. None unless some
    parameters hold a common multiple of the big batch's gradient, others hold this gradient itself,
    and a scalar of the step reaches only the former.
    """
    view = pieces.view
    total = uniform * pieces.own.sum(0)
    factors: dict[str, float | None] = {}
    for name, place in view.parameters.places.items():
        factors[name] = pieces.factor_between(total[place], view.expected[place])
    tolerance = max(EQUAL, pieces.tolerance)
    right = {name for name, one in factors.items() if one and abs(one - 1) <= tolerance}
    wrong = {name: one for name, one in factors.items() if one is not None and name not in right}
    values = list(wrong.values())
    if view.parameters.total_of(wrong) < FEWEST:
        return None
    if not right or not values or max(values) - min(values) > tolerance * max(map(abs, values)):
        return None
    calls = [call for call in view.observed.calls.of(0) if call.kind is Kind.LOSS and call.names]
    terms = [call for call in calls if wrong.keys() & call.names and not right & set(call.names)]
    if not terms:
        return None
    joined = [call for call in calls if wrong.keys() & call.names and right & set(call.names)]
    often = text_of(values[0], ".4g")
    text = f"The gradients of {named(list(wrong))} are {often} times the big batch's, and those of "
    text += f"{named(sorted(right))} are right. So a term of the loss that reaches only the former "
    text += f"counts {often} times."
    note = f"a term of the loss that reaches {named(list(wrong)[:1])} counts {often} times"
    return Whereabouts(
        kind="own gradient",
        headline=f"a term of the loss counts {often} times",
        sentence=text,
        lines=distinct(
            [
                *_lines(terms, note)[-MOST_TERM_LINES:],
                *_lines(joined, "joins it with the rest of the loss", is_fault=False)[:1],
            ]
        ),
        parameters=tuple(wrong),
        ranks=tuple(range(view.world_size)),
    )


def _lines(calls: list[Call], note: str, is_fault: bool = True) -> list[PointedLine]:
    """Each line once, in the order of their last run; only the last one is the fault."""
    found = list({call.line: None for call in reversed(calls) if call.line is not None})[::-1]
    return [
        PointedLine(line, note, is_fault)
        if number + 1 == len(found)
        else PointedLine(line, "an earlier part of this term")
        for number, line in enumerate(found)
        if line is not None
    ]
