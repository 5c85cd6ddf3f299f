"""A report about wrong shares of the examples points at the line that takes a rank's share."""

from __future__ import annotations

import pytest

from ddp_equivalence import check
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
    (steps.in_a_sampler, "self.place = rank.local_rank"),
    (steps.in_words_of_its_own, "high = low + each + 1"),
    (steps.in_a_data_set, "at = number * self.crew + self.badge // 2"),
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
    (steps.in_a_sampler_of_too_many, "workers = rank.world_size * 2"),
    (steps.in_parts, "share = {name: leaf.split(3)[int(rank)] for name, leaf in batch.items()}"),
]


@pytest.mark.parametrize(("step", "line"), DROPPING)
def test_the_line_whose_shares_leave_examples_out_is_pointed_at(step: Step, line: str) -> None:
    verdict = checked(OWN, step, "examples_dropped")
    assert line in faults(verdict), verdict


def test_a_report_without_a_cause_says_which_examples_were_read_twice_and_by_none() -> None:
    verdict = check(OWN, steps.beside_another_fault)
    assert (verdict.outcome, verdict.causes) == ("different", ()), verdict
    report = " ".join(str(verdict).split())
    assert "Ranks 0, 2 both read examples 0 to 3; ranks 1, 3 both 4 to 7" in report
    assert "no rank reads 8 to 15." in report


def test_shares_that_are_right_are_not_said_to_overlap() -> None:
    verdict = check(OWN, steps.right_shares_and_a_wrong_factor)
    assert verdict.outcome == "different"
    assert "read example" not in str(verdict)
    assert "no rank reads" not in str(verdict)
