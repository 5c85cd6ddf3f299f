"""One step of the optimizers of one process, on a rank or in a replay, and the file it lies in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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

    Lines that ran before, None where none was seen: ``optimizer_made`` and ``loader_made`` those of
    the optimizer that stepped and of the loader from which the step read first; ``scheduled``:
    stepped a scheduler of the optimizer last. ``steps_with``: the options and state of optimizers.
    ``buffers_kept``: the name of a buffer -> the class of the user's that keeps it, as
    ``function``.
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
    generators: dict[Event, Tensor] = field(default_factory=dict)
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
    optimizer_made: CodeLine | None = None
    loader_made: CodeLine | None = None
    buffers_kept: Mapping[str, CodeLine | None] = field(default_factory=dict)
    scheduled: CodeLine | None = None
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


def read_step(folder: Path, number: int) -> Step:
    """Read the record of one step of a rank."""
    found: Step = read_whole(path_of_step(folder, number))
    return found


def in_float64(tensor: Tensor) -> Tensor:
    """The tensor, in float64 if it has floats of less."""
    lower = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.double() if lower else tensor
