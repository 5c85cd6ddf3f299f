"""Whether an edit repairs the step for good, or only hides what is wrong in this one case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.expected import Expected
from ddp_equivalence.diagnosis.expectation import expected_of
from ddp_equivalence.measurement.edited_code import EditedCode
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.trials import holding

MOST_RANKS = 8
"""The other layout on which an edit must be right has no more."""


def in_general(
    request: Request,
    expected: Expected,
    codes: Mapping[int, EditedCode],
    right: Sequence[int],
    until: float,
) -> list[int]:
    """Those of the right edits that repair the step on another layout with another seed as well:
    `rank == 1` -> `rank > 1` repairs two ranks only.
    """
    other = _elsewhere(request, expected)
    try:
        return [*holding(other, expected_of(other), codes, right, until)]
    except BadCase:  # this case cannot be split over other ranks
        return [*right]


def _elsewhere(request: Request, expected: Expected) -> Request:
    """The request on another layout, if the case allows one, and with another seed."""
    case, size = request.case, request.case.ranks.world_size
    sizes = (2 * size, size // 2, size + 1) if request.lane.device_type == "cpu" else (size // 2,)
    examples = expected.reference.examples
    for other in sizes if isinstance(case.shards, str) and "+" not in case.shards else ():
        if 1 < other <= MOST_RANKS and not any(count % other for count in examples):
            nodes = 2 if case.ranks.nodes == 1 and other % 2 == 0 else 1
            case = replace(case, layout=f"{nodes}x{other // nodes}")
            break
    return replace(request, case=replace(case, seed=case.seed + 1))
