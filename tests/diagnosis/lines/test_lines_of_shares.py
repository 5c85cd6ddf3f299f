"""A report about wrong shares of the examples points at the line that takes a rank's share."""

from __future__ import annotations

import pytest

from tests.diagnosis.lines import steps_that_share as steps
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults

OWN = case("2x2", shards="own")

OVERLAPPING = [
    (steps.in_a_closure, "begin = rank.local_rank * size"),
    (
        steps.in_a_comprehension,
        "own = [one for one in range(count) if (one + rank.node) % rank.world_size == rank.rank]",
    ),
    (steps.in_a_generator, "if number % others != max(me - 1, 0):"),
    (steps.in_properties, "return slice(self.first, self.first + self.size + 1)"),
    (steps.in_a_tuple, "return Span(begin=3 * rank.rank, length=4)"),
]


@pytest.mark.parametrize(("step", "line"), OVERLAPPING)
def test_the_line_that_lets_shares_overlap_is_pointed_at(step: Step, line: str) -> None:
    verdict = checked(OWN, step, "shares_overlap")
    assert line in faults(verdict), verdict
    assert "all read" in str(verdict) or "both read" in str(verdict)


DROPPING = [
    (
        steps.in_an_array,
        "return np.array_split(np.arange(count), rank.world_size + 1)[rank.rank]",
    ),
    (
        steps.in_two_places,
        "kept = [row for place, row in enumerate(stream) if place % rank.world_size == rank.rank]",
    ),
    (
        steps.in_two_places,
        "yield from islice(self.pairs, self.rank.rank, None, self.rank.world_size)",
    ),
    (steps.in_parts, "share = {name: leaf.split(3)[int(rank)] for name, leaf in batch.items()}"),
]


@pytest.mark.parametrize(("step", "line"), DROPPING)
def test_the_line_whose_shares_leave_examples_out_is_pointed_at(step: Step, line: str) -> None:
    verdict = checked(OWN, step, "examples_dropped")
    assert line in faults(verdict), verdict
