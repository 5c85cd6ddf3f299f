"""Ranks that exchange values, or reduce in groups: the line that is wrong is shown."""

from __future__ import annotations

from dataclasses import replace

from ddp_equivalence import Case
from ddp_equivalence.diagnosis.where.lines_of_divergences import RIGHT_ALONE, WRONG_ALONE
from tests.diagnosis.where import exchange_steps as steps
from tests.diagnosis.where.faulty import CASE, distance, unnamed

WORDS = Case(
    model=steps.Words, batch=steps.words, loss=steps.loss_of_words, layout="1x2", shards="own"
)


def test_a_collective_that_loses_a_gradient_is_marked_although_one_rank_is_wrong_too() -> None:
    where = unnamed(CASE, steps.sent_without_a_gradient)
    assert where.beside_one_rank == WRONG_ALONE
    assert where.headline == "a gradient is cut off"
    assert "all_to_all_single gives values of which autograd does not know" in where.sentence
    assert distance(replace(where, lines=where.lines[:1]), steps.exchanged) == 0


def test_positions_that_ranks_count_in_their_own_parts_are_no_divergence() -> None:
    where = unnamed(WORDS, steps.words_of_other_ranks_count)
    assert where.beside_one_rank == RIGHT_ALONE
    marked = replace(where, lines=tuple(line for line in where.lines if line.is_fault))
    assert distance(marked, steps.CrossEntropyOfParts) == 0, where.lines


def test_a_collective_in_a_group_of_other_ranks_is_shown_with_the_line_that_set_the_group() -> None:
    where = unnamed(replace(CASE, layout="2x2"), steps.in_a_group_of_others)
    assert where.headline == "all_reduce does nothing on ranks 0 and 2"
    assert where.ranks == (0, 2)
    assert distance(where, steps.Groups) == 0, where.lines


def test_a_barrier_or_a_count_in_a_group_of_other_ranks_is_no_fault() -> None:
    assert unnamed(CASE, steps.lead_alone).headline == "a gradient is cut off"


def test_ranks_that_no_collective_joins_are_told_with_the_line_that_chose_their_groups() -> None:
    where = unnamed(replace(CASE, layout="2x2"), steps.in_two_levels)
    assert where.headline == "gradients stay within groups of ranks"
    assert "groups {0, 1} and {2, 3}, and no collective joins these" in where.sentence
    assert distance(where, steps.Levels) == 0, where.lines
