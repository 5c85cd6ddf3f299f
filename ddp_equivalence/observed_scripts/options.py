"""What a user may say about how a script is observed."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypedDict

from ddp_equivalence.case.errors import BadCase

PRECISIONS = ("auto", "float64", "own")

Command = Sequence[str] | str
"""A command as words, or as a line for a shell."""


class ObserveOptions(TypedDict, total=False):
    """The named arguments of ``observe``; ``Options`` says what each of them does."""

    steps: int
    from_step: int
    one_process: Command | None
    flat: Command | None
    precision: str
    dropout: bool
    as_cpu: int
    folder: Path | str
    in_place: bool
    keep: Path | str | None
    deadline: float
    plant: str
    export: Path | str | None


WHERE = ("folder", "keep", "export")
"""Options that only say where something lies."""


@dataclass(frozen=True)
class Options:
    """``steps``: how many steps of optimizers are recorded, after ``from_step`` others have passed.

    ``one_process``: the command that trains in one process; None takes it from the command of the
    ranks. ``flat``: a command that trains in one process without gradient accumulation: it computes
    each step once more, with all rows of the step as one batch. ``precision``: "float64", "own"
    for that of the script, or "auto" for float64 unless the script fails in it. ``dropout``: False
    drops nothing, in any run. ``as_cpu``: so many CUDA devices are the CPU; 0 for none, -1 for as
    many as the command starts processes. ``folder``: where the command belongs. It runs in a copy
    of it that is made of links, or, with ``in_place``, in the folder itself. ``keep``: a new folder
    for what is recorded and printed, which is deleted otherwise. ``deadline``: the seconds that
    recording may take, and each step in one process. ``plant``: the name of a fault that is planted
    in the ranks, to see whether it is found. ``export``: a new folder for the first step that is
    different, as files that stand alone.

    Raises BadCase for a value that cannot be right.
    """

    steps: int = 3
    from_step: int = 0
    one_process: Command | None = None
    flat: Command | None = None
    precision: str = "auto"
    dropout: bool = True
    as_cpu: int = 0
    folder: Path | str = "."
    in_place: bool = False
    keep: Path | str | None = None
    deadline: float = 600.0
    plant: str = ""
    export: Path | str | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.steps) or self.steps < 1:
            raise BadCase("steps", self.steps, "a number of optimizer steps, from 1")
        if not _is_whole(self.from_step) or self.from_step < 0:
            raise BadCase("from_step", self.from_step, "a number of optimizer steps, from 0")
        if self.precision not in PRECISIONS:
            raise BadCase("precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        if not _is_whole(self.as_cpu) or self.as_cpu < -1:
            raise BadCase("as_cpu", self.as_cpu, "a number of devices, 0 for none, or -1")
        if not (isinstance(self.deadline, int | float) and 0 < self.deadline < math.inf):
            raise BadCase("deadline", self.deadline, "a number of seconds above 0")
        if not Path(self.folder).is_dir():
            raise BadCase("folder", str(self.folder), "a folder that exists")
        for name in ("keep", "export"):
            path = getattr(self, name)
            if path is not None and Path(path).exists():
                raise BadCase(name, str(path), "a path at which nothing is yet")
        if self.plant:
            _require_plantable(self.plant)

    def words(self) -> str:
        """The options that decide what is computed, as they stand on a command line before ``--``;
        those that have their usual values are left out.
        """
        found: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in WHERE or value == one.default:
                continue
            if one.name == "dropout":
                found.append("--no-dropout")
                continue
            found.append(f"--{one.name.replace('_', '-')}")
            if value is not True:
                found.append(value if isinstance(value, str) else _text(value))
        return "".join(f"{shlex.quote(word)} " for word in found)


def _text(value: object) -> str:
    if isinstance(value, Sequence):
        return shlex.join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def words_of(command: Command, field: str) -> tuple[str, ...]:
    """The words of a command. Raises BadCase if there are none, or a quote is left open."""
    try:
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise BadCase(field, command, f"a command as for a shell; {error}") from error
    if not words:
        right = "a command that trains, such as torchrun --nproc-per-node 2 train.py"
        raise BadCase(field, command, right)
    return words


def _require_plantable(name: str) -> None:
    """Raises BadCase for a fault that is planted in a step of ``check``, and not in torch."""
    from ddp_equivalence.faults import FAULTS
    from ddp_equivalence.faults.fault import Fault

    intact = Fault("", "").break_torch
    in_torch = [fault.name for fault in FAULTS.values() if fault.break_torch is not intact]
    if name not in in_torch:
        raise BadCase("plant", name, f"a fault that lies in torch, one of {', '.join(in_torch)}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
