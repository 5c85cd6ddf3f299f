"""The instructions to the processes of an observed script, the queries to them, and answers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from torch import Tensor

from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.observed_scripts.options import Options
from ddp_equivalence.observed_scripts.record import Piece, Step, read_whole
from ddp_equivalence.report.text import write_file

VARIABLE = "DDP_EQUIVALENCE_OBSERVE"
"""The environment variable that names the file with ``Instructions``."""

STARTED_BY = "DDP_EQUIVALENCE_STARTED_BY"
"""The environment variable with the id of the process that judges."""

Role = Literal["record", "replay"]


# The instructions with which the processes of a script start.


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
class Instructions:
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
        write_file(path, pickle.dumps(self))

    @classmethod
    def read(cls, path: Path) -> Instructions:
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
