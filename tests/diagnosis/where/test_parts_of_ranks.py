"""Ranks that share sequences, units of a layer, or numbers show the line at which they part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddp_equivalence import Case
from ddp_equivalence.diagnosis.where.lines_of_divergences import RIGHT_ALONE
from tests.diagnosis.where import parts_of_ranks_steps as steps
from tests.diagnosis.where.faulty import CASE, distance, unnamed

TAGS = Case(
    model=steps.Tagger,
    batch=steps.sequences,
    loss=steps.tagger_loss,
    layout="1x2",
    shards="own",
)
UNITS = Case(
    model=steps.Block,
    batch=steps.rows_only,
    loss=steps.block_loss,
    layout="1x2",
    shards="own",
)
COUNTS = replace(CASE, batch=steps.counted, loss=steps.counted_loss, layout="1x2")
POOLED = replace(CASE, model=steps.Pooled, loss=steps.pooled_loss, layout="1x2")


@pytest.mark.parametrize(
    ("case", "step", "within"),
    [
        (TAGS, steps.other_weights_than_places, None),
        (TAGS, steps.places_of_others, steps.Halves),
        (replace(UNITS, layout="2x2"), steps.residual_on_every_rank, None),
        (COUNTS, steps.largest_count_of_a_message, None),
        (POOLED, steps.moments_without_a_gradient, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_at_which_parts_of_ranks_go_astray_comes_first(
    case: Case, step: Any, within: Any
) -> None:
    where = unnamed(case, step)
    assert where.beside_one_rank.startswith(RIGHT_ALONE)
    assert where.lines[0].is_fault
    assert distance(replace(where, lines=where.lines[:1]), within or step) == 0, where.lines


def test_only_the_collective_that_the_loss_is_made_of_loses_a_gradient() -> None:
    where = unnamed(POOLED, steps.moments_without_a_gradient)
    assert where.headline == "a collective loses a gradient"
    assert len([one for one in where.lines if one.is_fault]) == 1
