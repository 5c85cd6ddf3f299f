"""The record of an observed script: what every rank did at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from ddp_equivalence.comparison.gradients import digest
from ddp_equivalence.observed_scripts.recorded_step import (
    Event,
    Step,
    rank_folder,
    read_step,
    read_whole,
)
from ddp_equivalence.observed_scripts.rows import Rows
from ddp_equivalence.observed_scripts.told import Piece
from ddp_equivalence.report.text import plural


@dataclass(frozen=True)
class Row:
    """One row that a rank read. ``row``: its place in the micro-batch; None where rows are not
    known, and the micro-batch counts as one.
    """

    rank: int
    micro_batch: int
    row: int | None


class Record:
    """``folder``: where the ranks wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def runs(self) -> dict[int, dict[str, Any]]:
        """The facts that each rank states of its process, by rank."""
        found = {}
        for path in sorted(self.folder.glob("rank*/run.pt")):
            found[int(path.parent.name.removeprefix("rank"))] = read_whole(path)
        return found

    @property
    def world_size(self) -> int:
        """The number of ranks; 0 if nothing was recorded."""
        return max((run["world_size"] for run in self.runs.values()), default=0)

    @cached_property
    def steps_by_rank(self) -> tuple[int, ...]:
        """How many steps each rank has completed."""
        folders = [rank_folder(self.folder, rank) for rank in range(self.world_size)]
        return tuple(sum(1 for _ in at.glob("step*.pt")) for at in folders)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that every rank has completed."""
        return tuple(range(min(self.steps_by_rank, default=0)))

    @lru_cache(maxsize=256)  # noqa: B019  (few records are read in a process)
    def step(self, rank: int, number: int) -> Step:
        """One step of one rank."""
        return read_step(rank_folder(self.folder, rank), number)

    @cached_property
    def feed(self) -> Literal["loader", "calls"]:
        """A replay is given rows where the script's loader yields a batch, or where its model is
        called.
        """
        return "loader" if self.steps and self.step(0, self.steps[0]).used else "calls"

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The steps, with those together that are computed from what was read once."""
        groups: list[list[int]] = []
        for number in self.steps:
            step = self.step(0, number)
            reads = step.used if self.feed == "loader" else step.calls
            if reads or not groups:
                groups.append([])
            groups[-1].append(number)
        is_short = len(groups) > 1 and len(groups[-1]) < len(groups[-2])
        if is_short and len(set(self.steps_by_rank)) == 1:
            groups.pop()  # the script ended inside of it
        return tuple(map(tuple, groups))

    def read(self, rank: int, group: Sequence[int]) -> list[Rows]:
        """The rows that a rank read in each micro-batch of a group of steps."""
        places = self._micro_batches(rank, group)
        return [self.step(rank, number).read_rows[place] for number, place in places]

    def read_by_micro_batch(self, group: Sequence[int]) -> list[list[Rows]]:
        """For each micro-batch, what the ranks read in it that have one with this number."""
        by_number = zip_longest(*(self.read(rank, group) for rank in range(self.world_size)))
        return [[rows for rows in of_ranks if rows is not None] for of_ranks in by_number]

    def counts(self, rank: int, group: Sequence[int]) -> tuple[int, ...]:
        """The number of rows in each micro-batch of a rank."""
        return tuple(rows.count for rows in self.read(rank, group))

    def is_cut_short(self, group: Sequence[int]) -> bool:
        """True if the last batch of a group of steps is the last of an epoch, and it has fewer
        micro-batches than another one.
        """
        step = self.step(0, group[-1])
        batches = step.epoch.batches
        if self.feed != "loader" or not batches or not step.used:
            return False
        first = self.step(0, self.steps[0]).used[0][0]
        numbers = [number for loader, number in step.used if loader == first]
        most = max(len(self.counts(0, one)) for one in self.groups)
        is_short = len(self.counts(0, group)) < most
        return is_short and bool(numbers) and (numbers[-1] + 1) % batches == 0

    def _micro_batches(self, rank: int, group: Sequence[int]) -> list[tuple[int, int]]:
        """For each micro-batch of a rank, the step and the place there of its batch, from the first
        loader; where there is no loader, of the first call of its module.
        """
        if self.feed == "loader":
            first = self.step(0, group[0]).used[0][0]
            return [
                (number, place)
                for number in group
                for place, (loader, _) in enumerate(self.step(rank, number).used)
                if loader == first
            ]
        backwards = [call.backwards for call in self.step(rank, group[0]).calls]
        return [(group[0], backwards.index(one)) for one in sorted(set(backwards))]

    def ranks_draw_alike(self, number: int) -> bool:
        """True if the generators of all ranks were in the same state when a step first called a
        module.
        """
        ranks = range(self.world_size)
        states = [self.step(rank, number).generators.get(Event("call")) for rank in ranks]
        known = [state for state in states if state is not None]
        return len(known) == len(states) and all(torch.equal(one, known[0]) for one in known)

    def ragged_and_drawn(self) -> bool:
        """True if random numbers are drawn in a step in which ranks have padded their rows to
        other lengths: one process cannot draw the same for rows of one length.
        """
        return any(
            len({rows.tensors[path].shape[1:] for rows in of_ranks if path in rows.tensors}) > 1
            for group in self.groups
            if any(self.step(rank, n).draws for rank in range(self.world_size) for n in group)
            for of_ranks in self.read_by_micro_batch(group)
            for path in of_ranks[0].tensors
        )

    def rows(self, group: Sequence[int]) -> tuple[Row, ...]:
        """All rows with which the ranks have trained in a group of steps: rank by rank, as each
        read them.
        """
        return tuple(
            Row(rank, micro_batch, row)
            for rank in range(self.world_size)
            for micro_batch, count in enumerate(self.counts(rank, group))
            for row in (range(count) if count else (None,))
        )


def pieces_of(rows: Sequence[Row], counts: dict[tuple[int, int], int]) -> tuple[Piece, ...]:
    """These rows as pieces, in their order. ``counts``: of each (rank, micro-batch)."""
    pieces = []
    for read, of_it in groupby(rows, key=lambda row: (row.rank, row.micro_batch)):
        places = tuple(row.row for row in of_it)
        known = tuple(place for place in places if place is not None)
        is_whole = places != known or places == tuple(range(counts[read]))
        pieces.append(Piece(*read, None if is_whole else known))
    return tuple(pieces)


# Says how many rows several ranks have read, where each rank should read others.
#
# A sampler that every rank shuffles with a seed of its own deals no partition. The gradients are
# right all the same for the rows that were read, so this is no difference.

LEAST_ELEMENTS = 3
"""Rows of fewer elements, such as labels, are too often equal by chance."""

BY_CHANCE = 4
"""Ranks share at least so many times as many rows as one of them has read twice. Of rows that are
drawn with replacement, two ranks share twice as many.
"""

MOST_ELEMENTS = 1 << 26
"""A leaf with more elements than this, on all ranks together, is not looked at."""


def read_by_several_ranks(record: Record) -> str:
    """How many rows more than one rank has read; "" if none, all, or if it is not known.

    A rank reads few equal rows itself, unless the data has some, or rows are drawn more than once.
    """
    by_rank = [_rows_of_rank(record, rank) for rank in range(record.world_size)]
    for path in set.intersection(*(set(one) for one in by_rank)):
        rows = [one[path] for one in by_rank]
        equal = max(len(of_rank) - len(set(of_rank)) for of_rank in rows)
        ranks_of = Counter(row for of_rank in rows for row in set(of_rank))
        shared = sum(count > 1 for count in ranks_of.values())
        if BY_CHANCE * (equal + 1) <= shared < len(ranks_of):
            return (
                f"{shared} of {len(ranks_of)} different rows {plural(shared, 'was', 'were')} read "
                "by more than one rank. Unless the data has equal rows, or rows are drawn with "
                "replacement, other rows are read by none"
            )
    return ""


def _rows_of_rank(record: Record, rank: int) -> dict[str, list[str]]:
    """Digests of the rows that a rank has read in all steps, by the path of their leaf."""
    found: dict[str, list[str]] = {}
    for group in record.groups:
        for rows in record.read(rank, group):
            for path, tensor in rows.tensors.items():
                is_small = tensor.numel() * record.world_size <= MOST_ELEMENTS
                if rows.has_rows(path) and is_small and tensor[0].numel() >= LEAST_ELEMENTS:
                    found.setdefault(path, []).extend(digest({"": row}) for row in tensor)
    return found
