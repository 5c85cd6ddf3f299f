"""The options with which a user says how a script is observed. Nothing here imports torch."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from ddp_equivalence.case.errors import BadCase, one_of

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


OF_COMMAND: dict[str, dict[str, Any]] = {
    "steps": {"help": "record N optimizer steps; default 3", "metavar": "N"},
    "from_step": {
        "help": "let N optimizer steps pass before the first one that is recorded; default 0",
        "metavar": "N",
    },
    "one_process": {
        "help": "the command that trains in one process, quoted as one argument; by default the "
        "number of processes in COMMAND is replaced by 1",
        "metavar": "COMMAND",
    },
    "flat": {
        "help": "a command that trains in one process without gradient accumulation, quoted as one "
        "argument: it computes every step once more, with all of its rows as one batch",
        "metavar": "COMMAND",
    },
    "precision": {
        "help": "float64 shows faults far above rounding; own keeps the precision of the script; "
        "auto (the default) takes float64 unless the script fails in it",
        "choices": PRECISIONS,
    },
    "dropout": {"help": "let the script drop nothing, in both runs"},
    "as_cpu": {
        "help": "run a script that needs CUDA on the CPU: N CUDA devices (default: as many as the "
        "command starts processes) are the CPU, and NCCL is gloo",
        "nargs": "?",
        "const": -1,
        "metavar": "N",
    },
    "deadline": {
        "help": "the time that recording may take, and each step in one process; default 600",
        "metavar": "SECONDS",
    },
    "in_place": {"help": "run in this folder, and not in a copy of it that is made of links"},
    "plant": {
        "help": "plant a known fault in the ranks, to see that it is found",
        "metavar": "FAULT",
    },
    "export": {
        "help": "write the first step that differs to DIR, as files that stand alone",
        "metavar": "DIR",
    },
    "keep": {"help": "keep the recordings and outputs in DIR", "metavar": "DIR"},
}
"""What each option does, and how a command line shows it."""


@dataclass(frozen=True)
class Options:
    """See ``OF_COMMAND``. ``folder``: where the command belongs; a command line has none.

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
            raise BadCase("precision", self.precision, one_of(PRECISIONS, self.precision))
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
            if one.name in ("folder", "keep", "export") or value == one.default:
                continue  # they only say where something lies
            found.append(flag_of(one))
            if not isinstance(value, bool):
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
        raise BadCase("plant", name, f"a fault that lies in torch, {one_of(in_torch, name)}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def flag_of(one: Field[Any]) -> str:
    """The option of the command line for this field."""
    return f"--{'no-' if one.default is True else ''}{one.name.replace('_', '-')}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option that a command line has."""
    fields_by_name = {one.name: one for one in fields(Options)}
    for name, shown in OF_COMMAND.items():
        one = fields_by_name[name]
        how: dict[str, Any] = {"default": one.default}
        if isinstance(one.default, bool):
            how["action"] = "store_false" if one.default else "store_true"
        elif isinstance(one.default, int | float):
            how["type"] = type(one.default)
        parser.add_argument(flag_of(one), dest=name, **how, **shown)
