"""The record of an observed script: what every rank did at each step, and the files it lies in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

# The names are taken before a script can replace these functions.
from torch import load as load_tensors
from torch import save as save_tensors
from torch.serialization import get_crc32_options, set_crc32_options

from ddp_equivalence.comparison.gradients import digest
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.rows import Rows
from ddp_equivalence.report.text import plural

# One step of the optimizers of one process, on a rank or in a replay, and the file it lies in.

GradientKind = Literal["before_clip", "held", "own", "stale"]
BEFORE_CLIP: GradientKind = "before_clip"
HELD: GradientKind = "held"
OWN: GradientKind = "own"
STALE: GradientKind = "stale"
"""Gradients of a rank: before they are clipped, as the optimizer gets them, its own, before any
reduction, or those that were there before the step went backward."""


def text_of_line(line: CodeLine | None) -> str:
    """``train.py:12``; "" if the line is not known."""
    return "" if line is None else f"{os.path.basename(line.file)}:{line.number}"


GeneratorStates = dict[str, Tensor]
"""The states of torch's default generators, by the kind of device."""


def same_states(one: GeneratorStates, other: GeneratorStates) -> bool:
    """True if generators in these states draw the same numbers."""
    return one.keys() == other.keys() and all(torch.equal(one[kind], other[kind]) for kind in one)


@dataclass(frozen=True)
class Event:
    """``number``: how many events of this kind there were before, after so many backward passes.

    ``passes``: those of a whole step; a replay may make others than a rank.
    """

    kind: str
    passes: int = 0
    number: int = 0


@dataclass(frozen=True)
class SeenCall:
    """A call of an outermost module with gradients enabled, one that is trained.

    ``module``: its name in the record. ``backwards``: how many backward passes had run before.
    ``place``: the line that called it. ``rows``: its arguments.
    """

    module: str
    backwards: int
    place: CodeLine | None
    rows: Rows


@dataclass(frozen=True)
class SeenClip:
    """A call of torch's clip_grad_norm_ or clip_grad_value_.

    ``scale``: the loss scale by which the gradients were still multiplied. ``changed``: the
    gradients were really made smaller.
    """

    limit: float
    norm: float
    scale: float
    changed: bool
    place: CodeLine | None = None


@dataclass(frozen=True)
class Epoch:
    """Of a loader. ``batches``: how many it has in an epoch; 0 if that is not known.
    ``last_rows``: the rows of the last one, if they are fewer than those of the others, else 0.
    ``made``: the number of loaders that the script had made before this one; None if not known.
    """

    batches: int = 0
    last_rows: int = 0
    made: int | None = None


class LastLine(Enum):
    """A way in which a line makes or changes what a script trains with."""

    MADE = "makes it"
    LOADED = "loads its state"
    CLEARED = "clears gradients"
    SCHEDULED = "steps its scheduler"


@dataclass
class Step:
    """All that one process has done from one step of its optimizers to the next. A rank writes it
    when an optimizer steps, and so does a replay, in which less is known.

    Gradients by name, without a loss scale: ``own``: this process's own ones, before any reduction,
    summed over the backward passes, and ``own_of_each`` of them; ``before_clip``: None if nothing
    was clipped; ``held``: those with which the optimizer steps, None for a parameter without one;
    ``stale``: those that were there before the first backward pass.

    ``number``: of the step, from 0. ``optimizers``: the classes of those that stepped.
    ``losses``: the value at which each backward pass began, without the loss scale in ``scales``.
    ``used``: the (loader, number) of each batch that was read, in order, and ``batches`` their
    rows. Loaders have numbers in the order in which they were first trained with; ``loaders``: for
    each, its number among all over which this process iterated, of which some are for evaluation.
    ``epoch``: of the first loader.

    ``calls``, ``clips``: as they happened. ``results``: the mark of what each call returned, see
    ``mark_of``. ``entered``: the modules that were called. ``weights``: a digest of every tensor of
    a module at its first call, and ``states`` the tensors, on rank 0. ``left``: what the buffers of
    one process held before those of the record replaced them, and ``left_by``: the number of the
    step that it had computed before, and the rows with which modules were called there.
    ``generators``: states of torch's generators, by the event before which they were taken;
    ``events``: how many there were. ``draws``: the script drew random numbers. ``in_python``: see
    ``held_in_python``. ``lowest``: the least precise dtype in which a value was rounded inside a
    script that computes in float64, in a replay that was nudged.

    ``unnamed``: the number of parameters of the optimizer that are in no module which was called.
    ``frozen``: those that require no gradient. ``stepped_at``: the line that called the optimizer,
    and ``backward_at`` those that called backward. ``autocast``: the dtypes of the autocast regions
    in which a module was called. ``batch_norm``: a trained module normalises by the statistics of
    its batch. ``planted``: how often a planted fault had fired; None if none was planted.

    ``last_lines``: for each change that was seen, the last line that did it with "optimizer", the
    one that stepped, with "loader", the one from which the step read first, or with a module, by
    its name. Gradients that an earlier step cleared do not count. ``steps_with``: the options and
    state of optimizers. ``buffers_kept``: for each buffer, the user's class that keeps it.
    """

    number: int = 0
    own: dict[str, Tensor] = field(default_factory=dict)
    own_of_each: list[dict[str, Tensor]] = field(default_factory=list)
    before_clip: dict[str, Tensor | None] | None = None
    held: dict[str, Tensor | None] = field(default_factory=dict)
    stale: dict[str, Tensor] = field(default_factory=dict)
    optimizers: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    used: tuple[tuple[int, int], ...] = ()
    batches: Sequence[Rows] = ()
    loaders: tuple[int, ...] = ()
    epoch: Epoch = field(default_factory=Epoch)
    calls: list[SeenCall] = field(default_factory=list)
    results: list[float] = field(default_factory=list)
    clips: list[SeenClip] = field(default_factory=list)
    entered: set[str] = field(default_factory=set)
    weights: dict[str, str] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    left_by: tuple[int, int] | None = None
    generators: dict[Event, GeneratorStates] = field(default_factory=dict)
    events: Counter[tuple[str, int]] = field(default_factory=Counter)
    draws: bool = False
    in_python: dict[str, str] = field(default_factory=dict)
    lowest: str = ""
    unnamed: int = 0
    frozen: set[str] = field(default_factory=set)
    stepped_at: CodeLine | None = None
    backward_at: list[CodeLine | None] = field(default_factory=list)
    autocast: set[str] = field(default_factory=set)
    batch_norm: bool = False
    planted: int | None = None
    last_lines: Mapping[tuple[LastLine, str], CodeLine] = field(default_factory=dict)
    buffers_kept: Mapping[str, CodeLine | None] = field(default_factory=dict)
    steps_with: dict[str, str] = field(default_factory=dict)

    @property
    def stepped(self) -> list[str]:
        """The parameters of the optimizer that have a gradient."""
        return [name for name, gradient in self.held.items() if gradient is not None]

    def gradients(self, kind: GradientKind) -> dict[str, Tensor | None]:
        """The gradients of the parameters that the optimizer has."""
        values: Mapping[str, Tensor | None] = getattr(self, kind) or {}
        if kind == BEFORE_CLIP and not values:
            values = self.held
        return {name: values.get(name) for name in self.held}

    @property
    def computed(self) -> dict[str, Tensor | None]:
        """The gradients that backward computed in one process, where nothing is reduced."""
        is_known = all(name in self.own for name in self.stepped)
        return self.gradients(OWN if is_known else BEFORE_CLIP)

    @property
    def read_rows(self) -> Sequence[Rows]:
        """The rows that were read from loaders; without one, the arguments of each call."""
        return self.batches or [call.rows for call in self.calls]

    @property
    def rows_of_calls(self) -> int:
        """With how many rows trained modules were called."""
        return sum(call.rows.count for call in self.calls)

    def last_line(self, change: LastLine, *of: str) -> CodeLine | None:
        """The last line that made this change to the first of these; None if none was seen."""
        found = (self.last_lines.get((change, one)) for one in of)
        return next(filter(None, found), None)

    @property
    def last_backward(self) -> CodeLine | None:
        """The line that went backward last."""
        return self.backward_at[-1] if self.backward_at else None

    @property
    def read(self) -> tuple[tuple[str, ...], ...]:
        """For each micro-batch, digests of the tensors with rows that its first call was given.

        What later calls are given may depend on what is computed.
        """
        first: dict[int, Rows] = {}
        for call in self.calls:
            first.setdefault(call.backwards, call.rows)
        return tuple(
            tuple(digest({path: tensor}) for path, tensor in one.tensors_with_rows())
            for _, one in sorted(first.items())
        )


def rank_folder(folder: str | Path, rank: int) -> Path:
    """Where one rank's record lies."""
    return Path(folder) / f"rank{rank}"


def write_whole(path: Path, value: Any) -> None:
    """Write a file so that whoever reads it meanwhile finds all of it, or nothing."""
    unfinished, checksums = path.with_suffix(".part"), get_crc32_options()
    set_crc32_options(False)  # they take twice as long as writing
    try:
        save_tensors(value, unfinished)
    finally:
        set_crc32_options(checksums)
    unfinished.rename(path)


def read_whole(path: str | Path) -> Any:
    """Read what ``write_whole`` wrote in a process of ours; tensors when they are used."""
    return load_tensors(path, mmap=True, weights_only=False)


def path_of_step(folder: Path, number: int) -> Path:
    """Where one rank's step lies. If the file is there, the step is complete."""
    return folder / f"step{number}.pt"


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor, in float64 if it has floats of less."""
    lower = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.double() if lower else tensor


# The steps of all ranks.


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
        found: Step = read_whole(path_of_step(rank_folder(self.folder, rank), number))
        return found

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
        states = [self.step(rank, number).generators.get(Event("call"), {}) for rank in ranks]
        return all(one and same_states(one, states[0]) for one in states)

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


@dataclass(frozen=True)
class Piece:
    """Rows that one rank read in one micro-batch. ``rows``: which of them; None for all."""

    rank: int
    micro_batch: int
    rows: tuple[int, ...] | None = None


def pieces_of(rows: Sequence[Row], counts: Sequence[Sequence[int]]) -> tuple[Piece, ...]:
    """These rows as pieces, in their order. ``counts``: of each micro-batch of each rank."""
    pieces = []
    for read, of_it in groupby(rows, key=lambda row: (row.rank, row.micro_batch)):
        places = tuple(row.row for row in of_it)
        known = tuple(place for place in places if place is not None)
        rank, micro_batch = read
        is_whole = places != known or places == tuple(range(counts[rank][micro_batch]))
        pieces.append(Piece(rank, micro_batch, None if is_whole else known))
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
