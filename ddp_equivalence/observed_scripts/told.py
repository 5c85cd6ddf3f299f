"""All that the processes of an observed script are told and asked, and their answers."""

from __future__ import annotations

import math
import pickle
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypedDict

from torch import Tensor

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.observed_scripts.recorded_step import Step, read_whole

VARIABLE = "DDP_EQUIVALENCE_OBSERVE"
"""The environment variable that names the file with ``Told``."""

STARTED_BY = "DDP_EQUIVALENCE_STARTED_BY"
"""The environment variable with the id of the process that judges."""

Role = Literal["record", "replay"]


# What a user may say about how a script is observed.

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


# What the processes of a script are told when they start.


@dataclass(frozen=True)
class LookAt:
    """A step that is to be watched line by line.

    ``module``: the name of the module whose gradients are compared. ``sample``: the elements of
    each parameter that are kept. ``rows``: for each rank, the number of the first row of each of
    its micro-batches, and how many there are. ``clipped_after``: the number of backward passes
    after which gradients are clipped, where those are compared that are not clipped yet; 0 if they
    are never clipped. ``operations``: log those of torch, too. ``set_up``: watch what the script
    does before, which takes time.
    """

    module: str
    sample: ElementSample[str]
    rows: Sequence[Sequence[tuple[int, int]]]
    clipped_after: int = 0
    operations: bool = False
    set_up: bool = True


@dataclass(frozen=True)
class Told:
    """``role``: record what the ranks do, or replay it in one process.

    ``folder``: where records are written, and read from. ``options``: those of the run that are
    for these processes. ``float64``: everything is computed in float64. ``socket``: where a replay
    asks what to run. ``look_at``: what to watch line by line in the first step that
    counts; None for nothing. ``working_folder``: a copy of the user's folder, in which links stand
    for files that must not be written to; "" if the script runs in the user's own.
    """

    role: Role
    folder: str
    options: Options
    float64: bool
    socket: str = ""
    look_at: LookAt | None = None
    working_folder: str = ""

    def write(self, path: Path) -> None:
        """Write it where ``read`` finds it."""
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, path: Path) -> Told:
        """Read what ``write`` has written."""
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, cls)
        return found


# What a replay is asked to compute, and its answer, whose steps lie in files.

RowOrder = Literal["by row", "in blocks", "in dim 1", "no rows"]
"""How the rows of a batch follow one another in random numbers that are drawn for them. Where each
row has several entries, those of one row stand together, or else the first entries of all rows come
first, and then the second ones. ``in dim 1``: not in dim 0, which is the time in some models.
``no rows``: the numbers belong to no row, such as noise that is added to weights.
"""


def path_of_kept(folder: Path, steps: tuple[int, ...]) -> Path:
    """Where the process listens that is kept at the beginning of these steps."""
    return folder / f"kept{steps[0]}"


STATE = "state "
"""Before the digest of the state of a generator."""


@dataclass(frozen=True)
class Piece:
    """Rows that one rank read in one micro-batch. ``rows``: which of them; None for all."""

    rank: int
    micro_batch: int
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class State:
    """Buffers with these names come from the answer in this file, and not from the record."""

    file: str = ""
    names: tuple[str, ...] = ()

    def of(self, name: str) -> Tensor | None:
        """The value of a buffer; None for that of the record."""
        return _step_in(self.file).left[name] if name in self.names else None


OF_RECORD = State()


@dataclass(frozen=True)
class Query:
    """``steps``: the recorded steps to compute, more than one where several optimizers step one
    after the other on what was read once. ``micro_batches``: for each micro-batch, the pieces whose
    rows are joined. ``nudge``: the number of the pattern by which weights are moved one eps up or
    down; 0 for none. ``row_order``: that of random numbers. ``logged``: the name of a module; from
    its first call on, the operations of torch are logged. "" for none. ``is_epoch``: the script
    gets these micro-batches as an epoch of their own, because on the ranks they ended one, and may
    have been fewer than usual. ``state``: buffers that are not those of the record. ``keep``: keep
    a process at the beginning of the steps, to answer later questions about them.
    """

    number: int
    steps: tuple[int, ...]
    micro_batches: tuple[tuple[Piece, ...], ...]
    nudge: int = 0
    row_order: RowOrder = "by row"
    logged: str = ""
    is_epoch: bool = False
    state: State = OF_RECORD
    keep: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose rows are in it, each once."""
        return tuple(dict.fromkeys(piece.rank for one in self.micro_batches for piece in one))


@dataclass(frozen=True)
class Answer:
    """The answer to the query with this number. ``files``: each of them holds a ``Step``.
    ``missed``: how often each random operation drew other numbers than the ranks, because it does
    not draw by rows. ``operations``: those that were logged; None if none were. ``alike``: the
    lines at which all ranks in the query drew the same random numbers for their rows.
    """

    number: int
    files: tuple[str, ...]
    missed: Mapping[str, int] = field(default_factory=dict)
    operations: Operations | None = None
    alike: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that were computed."""
        return tuple(map(_step_in, self.files))

    @property
    def bytes(self) -> int:
        """How much the files hold."""
        return sum(Path(file).stat().st_size for file in self.files)

    def delete(self) -> None:
        """Delete the files, which nobody needs."""
        for file in self.files:
            Path(file).unlink(missing_ok=True)


@lru_cache(maxsize=8)
def _step_in(file: str) -> Step:
    found: Step = read_whole(file)
    return found
