"""Collectives after which ranks read other rows of the batch than they were given."""

from __future__ import annotations

from ddp_equivalence.diagnosis.examples_read import read_by_no_rank
from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.lines.lines_that_read import data_collectives
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View


def ranks_with_other_rows(view: View) -> tuple[int, ...]:
    """The ranks that read rows which others were given, and none of their own.

    Empty if it is not known what the ranks read, or if every row was read.
    """
    shards, read = view.setting.shards, view.observed.examples_read
    if shards is None or read is None or not read_by_no_rank(view):
        return ()
    found = []
    for rank, (given, parts) in enumerate(zip(shards, read, strict=True)):
        rows = {row for part in parts for row in part}
        others = {row for other, shard in enumerate(shards) if other != rank for row in shard}
        if rows and not rows & set(given) and rows <= others:
            found.append(rank)
    return tuple(found)


def lines_that_replace_rows(view: View) -> list[PointedLine]:
    """The last collective before the forward pass, if ranks then read the rows of other ones."""
    ranks = ranks_with_other_rows(view)
    places = data_collectives(view) if ranks else []
    note = f"after it {ranks_by_number(ranks)} read{'s' if len(ranks) == 1 else ''} others' rows"
    return [place.pointed(note, is_fault=True) for place in places[-1:]]
