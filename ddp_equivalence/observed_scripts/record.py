"""The record of an observed script: what every rank did at each step, in files without pickles."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.query import Piece
from ddp_equivalence.observed_scripts.recorded_step import (
    Event,
    RecordedStep,
    StepReader,
    rank_folder,
)
from ddp_equivalence.observed_scripts.rows import Rows
from ddp_equivalence.observed_scripts.told import Feed
from ddp_equivalence.report.text import plural

# Everything that the ranks of an observed script recorded.


@dataclass(frozen=True)
class Row:
    """One row that a rank read. ``row``: its place in the micro-batch; None where rows are not
    known, and the micro-batch counts as one.
    """

    rank: int
    micro_batch: int
    row: int | None


class Record:
    """``folder``: where the ranks wrote. ``time_first``: batches have their rows in dim 1."""

    def __init__(self, folder: Path, time_first: bool = False) -> None:
        self.folder = folder
        self.time_first = time_first

    @cached_property
    def runs(self) -> dict[int, dict[str, Any]]:
        """What each rank says of itself, by rank."""
        found = {}
        for path in sorted(self.folder.glob("rank*/run.json")):
            found[int(path.parent.name.removeprefix("rank"))] = json.loads(path.read_text())
        return found

    @property
    def world_size(self) -> int:
        """The number of ranks; 0 if nothing was recorded."""
        return max((run["world_size"] for run in self.runs.values()), default=0)

    @cached_property
    def steps_by_rank(self) -> tuple[int, ...]:
        """How many steps each rank has completed."""
        folders = [rank_folder(self.folder, rank) for rank in range(self.world_size)]
        return tuple(sum(1 for _ in at.glob("step*[0-9].json")) for at in folders)

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that every rank has completed."""
        return tuple(range(min(self.steps_by_rank, default=0)))

    def step(self, rank: int, number: int) -> RecordedStep:
        """One step of one rank."""
        return self.reader(rank, number).step

    @lru_cache(maxsize=256)  # noqa: B019  (few records are read in a process)
    def reader(self, rank: int, number: int) -> StepReader:
        """Reads one step of one rank."""
        return StepReader(rank_folder(self.folder, rank), number, self.time_first)

    @cached_property
    def feed(self) -> Feed:
        """Where a replay can be given rows."""
        return "loader" if self.steps and self.step(0, self.steps[0]).batches else "calls"

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The steps, with those together that are computed from what was read once."""
        groups: list[list[int]] = []
        for number in self.steps:
            step = self.step(0, number)
            reads = step.batches if self.feed == "loader" else step.calls
            if reads or not groups:
                groups.append([])
            groups[-1].append(number)
        is_short = len(groups) > 1 and len(groups[-1]) < len(groups[-2])
        if is_short and len(set(self.steps_by_rank)) == 1:
            groups.pop()  # the script ended inside of it
        return tuple(map(tuple, groups))

    def counts(self, rank: int, group: Sequence[int]) -> tuple[int, ...]:
        """The number of rows in each micro-batch of a rank."""
        found = []
        for number, place in self._micro_batches(rank, group):
            reader = self.reader(rank, number)
            counts = reader.batch_counts if self.feed == "loader" else reader.call_counts
            found.append(counts[place])
        return tuple(found)

    def is_cut_short(self, group: Sequence[int]) -> bool:
        """True if the last batch of a group of steps is the last of an epoch, and it has fewer
        micro-batches than another one.
        """
        step = self.step(0, group[-1])
        batches = step.epoch.batches
        if self.feed != "loader" or not batches or not step.batches:
            return False
        first = self.step(0, self.steps[0]).batches[0][0]
        numbers = [number for loader, number in step.batches if loader == first]
        most = max(len(self.counts(0, one)) for one in self.groups)
        is_short = len(self.counts(0, group)) < most
        return is_short and bool(numbers) and (numbers[-1] + 1) % batches == 0

    def read(self, group: Sequence[int]) -> list[Rows]:
        """What the ranks read in a group of steps, in the order of ``rows``."""
        return [
            self.rows_read(rank, number, group)
            for rank in range(self.world_size)
            for number in range(len(self._micro_batches(rank, group)))
        ]

    def read_by_micro_batch(self, group: Sequence[int]) -> list[list[Rows]]:
        """For each micro-batch, what the ranks read in it that have one with this number."""
        by_number: dict[int, list[Rows]] = {}
        for rank in range(self.world_size):
            for number in range(len(self._micro_batches(rank, group))):
                by_number.setdefault(number, []).append(self.rows_read(rank, number, group))
        return list(by_number.values())

    def rows_read(self, rank: int, micro_batch: int, group: Sequence[int]) -> Rows:
        """What a rank read in one micro-batch of a group of steps."""
        kind = "batch" if self.feed == "loader" else "call"
        step, place = self._micro_batches(rank, group)[micro_batch]
        return self.reader(rank, step).rows(f"{kind}/{place}/")

    def _micro_batches(self, rank: int, group: Sequence[int]) -> list[tuple[int, int]]:
        """For each micro-batch of a rank, the step and the place there of its batch, from the first
        loader; where there is no loader, of the first call of its module.
        """
        if self.feed == "loader":
            first = self.step(0, group[0]).batches[0][0]
            return [
                (number, place)
                for number in group
                for place, (loader, _) in enumerate(self.step(rank, number).batches)
                if loader == first
            ]
        backwards = [call.backwards for call in self.step(rank, group[0]).calls]
        return [(group[0], backwards.index(one)) for one in sorted(set(backwards))]

    def ranks_draw_alike(self, number: int) -> bool:
        """True if the generators of all ranks were in the same state when a step first called a
        module.
        """
        event = Event("call").name(0)
        states = [self.reader(rank, number).tensor(event) for rank in range(self.world_size)]
        known = [state for state in states if state is not None]
        return len(known) == len(states) and all(torch.equal(one, known[0]) for one in known)

    def ragged_and_drawn(self) -> bool:
        """True if random numbers are drawn in a step in which ranks have padded their rows to
        other lengths: one process cannot draw the same for rows of one length.
        """
        for group in self.groups:
            steps = [self.step(rank, n) for rank in range(self.world_size) for n in group]
            if any(step.draws for step in steps) and self._ragged(group):
                return True
        return False

    def _ragged(self, group: Sequence[int]) -> bool:
        prefix = "batch/" if self.feed == "loader" else "call/"
        shapes: dict[str, set[tuple[int, ...]]] = {}
        if self.time_first:
            for rows in self.read(group):
                for path, tensor in rows.tensors.items():
                    shapes.setdefault(path, set()).add(tensor.shape[1:])
            return any(len(found) > 1 for found in shapes.values())
        for rank in range(self.world_size):
            for number in group:
                for name, shape in self.reader(rank, number).shapes_of_whole(prefix).items():
                    shapes.setdefault(name, set()).add(shape[1:])
        return any(len(found) > 1 for found in shapes.values())

    @property
    def may_be_time_first(self) -> bool:
        """True if batches may have their rows in dim 1, and are not taken so."""
        if self.time_first:
            return False
        other = Record(self.folder, time_first=True)
        read = [rows for group in other.groups for rows in other.read(group)]
        return bool(read) and all(rows.time_first for rows in read)

    def left_out(self, group: Sequence[int]) -> tuple[int, ...]:
        """The micro-batches that the ranks have read, and then gone backward with others. None if
        the ranks differ in that.
        """
        found = {
            self.step(r, group[0]).left_out if self.feed == "loader" else ()
            for r in range(self.world_size)
        }
        return found.pop() if len(found) == 1 else ()

    def rows(self, group: Sequence[int], left_out: Sequence[int] = ()) -> tuple[Row, ...]:
        """All rows with which the ranks have trained in a group of steps: rank by rank, as each
        read them. ``left_out``: those of these micro-batches instead, which were left out.
        """
        others = self.left_out(group)
        return tuple(
            Row(rank, micro_batch, row)
            for rank in range(self.world_size)
            for micro_batch, count in enumerate(self.counts(rank, group))
            if (micro_batch in left_out if left_out else micro_batch not in others)
            for row in (range(count) if count else (None,))
        )


def pieces_of(rows: Sequence[Row], counts: dict[tuple[int, int], int]) -> tuple[Piece, ...]:
    """These rows as pieces, in their order. ``counts``: of each (rank, micro-batch)."""
    pieces: list[Piece] = []
    for row in rows:
        last = pieces[-1] if pieces else None
        same = last is not None and (last.rank, last.micro_batch) == (row.rank, row.micro_batch)
        if row.row is None:
            pieces.append(Piece(row.rank, row.micro_batch))
        elif same and last is not None and last.rows is not None:
            pieces[-1] = Piece(row.rank, row.micro_batch, (*last.rows, row.row))
        else:
            pieces.append(Piece(row.rank, row.micro_batch, (row.row,)))
    return tuple(
        Piece(one.rank, one.micro_batch)
        if one.rows == tuple(range(counts[one.rank, one.micro_batch]))
        else one
        for one in pieces
    )


# Rows that every rank has sorted by their length stay sorted where one process has all of them.
#
# ``torch.nn.utils.rnn.pack_padded_sequence`` asks for that by default.


def in_falling_order(pieces: Sequence[Piece], read: Sequence[Rows]) -> Sequence[Piece]:
    """The pieces, taken apart and ordered so that lengths which fall on every rank fall on.

    ``read``: what the rank read in the micro-batch of each piece, with all of its rows.
    """
    lengths = _lengths(read)
    if lengths is None:
        return pieces
    of_each: list[tuple[int, Piece, int]] = [
        (int(of_piece[row]), piece, row)
        for piece, rows, of_piece in zip(pieces, read, lengths, strict=True)
        for row in (range(rows.count) if piece.rows is None else piece.rows)
    ]
    in_order = sorted(of_each, key=lambda one: -one[0])  # equal ones stay as they are
    if in_order == of_each:
        return pieces
    found: list[Piece] = []
    for _, piece, row in in_order:
        last = found[-1] if found else None
        if last is not None and (last.rank, last.micro_batch) == (piece.rank, piece.micro_batch):
            found[-1] = replace(last, rows=(*(last.rows or ()), row))
        else:
            found.append(replace(piece, rows=(row,)))
    return found


def _lengths(read: Sequence[Rows]) -> list[Tensor] | None:
    """The whole numbers that fall, or stay, from row to row in all of these, and that begin with
    the length of another tensor of the rows: then they are lengths, and no labels.
    """
    for path in read[0].tensors:
        if not all(path in rows.tensors and rows.has_rows(path) for rows in read):
            continue
        tensors = [rows.tensors[path] for rows in read]
        if all(map(_fall, tensors)) and _are_lengths(tensors, read):
            return tensors
    return None


def _fall(numbers: Tensor) -> bool:
    if numbers.ndim != 1 or numbers.dtype not in (torch.int32, torch.int64):
        return False
    return bool((numbers[:-1] >= numbers[1:]).all()) and int(numbers[-1]) > 0


def _are_lengths(numbers: Sequence[Tensor], read: Sequence[Rows]) -> bool:
    """True if another tensor with rows is as long as the longest of them, in all of these."""
    return any(
        all(
            other in rows.tensors
            and rows.has_rows(other)
            and rows.tensors[other].ndim > 1
            and rows.tensors[other].shape[1] == int(of_rows[0])
            for of_rows, rows in zip(numbers, read, strict=True)
        )
        for other in read[0].tensors
    )


# Says how many rows several ranks have read, where each rank should read others.
#
# A sampler that every rank shuffles with a seed of its own deals no partition: some rows count
# twice in an epoch, and others not at all. The gradients are right all the same for the rows that
# were read, so this is no difference.

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
    most = (0, 0)
    for path in set.intersection(*(set(one) for one in by_rank)):
        rows = [one[path] for one in by_rank]
        equal = max(len(of_rank) - len(set(of_rank)) for of_rank in rows)
        ranks_of = Counter(row for of_rank in rows for row in set(of_rank))
        shared = sum(count > 1 for count in ranks_of.values())
        if BY_CHANCE * (equal + 1) <= shared < len(ranks_of):
            most = max(most, (shared, len(ranks_of)))
    shared, distinct = most
    if not shared:
        return ""
    return (
        f"{shared} of {distinct} different rows {plural(shared, 'was', 'were')} read by more than "
        "one rank. Unless the data has equal rows, or rows are drawn with replacement, other rows "
        "are read by none"
    )


def _rows_of_rank(record: Record, rank: int) -> dict[str, list[bytes]]:
    """Digests of the rows that a rank has read in all steps, by the path of their leaf."""
    found: dict[str, list[bytes]] = {}
    for group in record.groups:
        for number in range(len(record.counts(rank, group))):
            rows = record.rows_read(rank, number, group)
            for path in rows.tensors:
                if _tells_apart(rows, path, record.world_size):
                    tensor = rows.tensors[path]
                    flat = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
                    digests = (hashlib.blake2b(row.data, digest_size=16) for row in flat.numpy())
                    found.setdefault(path, []).extend(one.digest() for one in digests)
    return found


def _tells_apart(rows: Rows, path: str, ranks: int) -> bool:
    tensor = rows.tensors[path]
    if not rows.has_rows(path) or tensor.numel() * ranks > MOST_ELEMENTS:
        return False
    return tensor[0].numel() >= LEAST_ELEMENTS
