"""A report about wrong examples points at the line that chooses them."""

from __future__ import annotations

from functools import partial

import pytest

from ddp_equivalence import Case
from tests.diagnosis.lines import steps_that_read as steps
from tests.diagnosis.lines.faulty_line import Step, case, checked, faults, notes, rows

OWN = case(shards="own")
OWN_TEN = case(shards="own", batch=partial(rows, count=10))
DEALT = case()
TEN_ON_TWO = case("1x2", batch=partial(rows, count=10))

SAME_DATA = [
    (
        steps.every_rank_takes_the_first_part,
        "start = self.rank.node * size",
        "let each of the 4 ranks read other ones of the 16 examples.",
    ),
    (
        steps.no_sampler,
        "loader = DataLoader(data, batch_size=len(data) // rank.world_size)",
        "give the DataLoader a DistributedSampler with num_replicas=4 and its rank.",
    ),
    (
        steps.sampler_of_rank_0,
        "sampler = DistributedSampler(data, world_size, rank=rank.node, shuffle=False)",
        "give DistributedSampler num_replicas=4 and the number of its own rank.",
    ),
]


@pytest.mark.parametrize(("step", "line", "fix"), SAME_DATA)
def test_the_line_that_gives_all_ranks_the_same_examples_is_pointed_at(
    step: Step, line: str, fix: str
) -> None:
    verdict = checked(OWN, step, "every_rank_same_data")
    assert (faults(verdict)[0], verdict.findings[0].fix) == (line, fix)
    assert "all 4 ranks read examples 0, " in notes(verdict)


PADDED = [
    (
        steps.sampler_that_pads,
        "sampler = DistributedSampler(data, shuffle=False)",
        "pads 10 examples by 2",
    ),
    (
        steps.padded_by_hand,
        "indices.append(indices[len(indices) - count])",
        "indices holds examples 0, 1 more than once",
    ),
]


@pytest.mark.parametrize(("step", "line", "note"), PADDED)
def test_the_line_that_pads_the_examples_is_pointed_at(step: Step, line: str, note: str) -> None:
    verdict = checked(OWN_TEN, step, "sampler_padding_counted")
    assert faults(verdict) == [line]
    assert f"{line}  {note}" in notes(verdict)
    assert verdict.findings[0].fix == (
        "count examples 0, 1 once: give the repetitions no weight, and divide by 10."
    )


DROPPED = [
    (
        steps.sampler_that_drops,
        OWN_TEN,
        "sampler = DistributedSampler(data, shuffle=False, drop_last=True)",
        "leaves out 2 examples",
        "let a rank read examples 8, 9 too, and divide by 10.",
    ),
    (
        steps.loader_that_drops,
        DEALT,
        "loader = DataLoader(data, batch_size=3, drop_last=True)",
        "leaves out a last batch that is not full",
        "let a rank read examples 3, 7, 11, 15 too, and divide by 16.",
    ),
    (
        steps.cut_to_an_even_length,
        TEN_ON_TWO,
        "count = len(inputs) - len(inputs) % 2",
        "inputs, targets = inputs[:count], targets[:count]  "
        "rank 0 reads 0 to 3; rank 1 reads 5 to 8",
        "let a rank read examples 4, 9 too, and divide by 10.",
    ),
]


@pytest.mark.parametrize(("step", "given", "line", "note", "fix"), DROPPED)
def test_the_line_that_drops_examples_is_pointed_at(
    step: Step, given: Case, line: str, note: str, fix: str
) -> None:
    verdict = checked(given, step, "examples_dropped")
    assert (faults(verdict), verdict.findings[0].fix) == ([line], fix)
    assert note in notes(verdict)
