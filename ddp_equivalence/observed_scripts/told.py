"""What the processes of an observed script are told, and where they leave what they saw."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_equivalence.comparison.gradients import ElementSample

VARIABLE = "DDP_EQUIVALENCE_OBSERVE"
"""The environment variable that names the file with ``Told``."""

STARTED_BY = "DDP_EQUIVALENCE_STARTED_BY"
"""The environment variable with the id of the process that judges."""

Role = Literal["record", "replay"]
Feed = Literal["loader", "calls"]


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

    ``folder``: where records are written, and read from. ``first_step``, ``steps``: the number of
    the first optimizer step that counts, from 0, and how many are recorded. ``float64``: everything
    is computed in float64. ``without_dropout``: nothing is dropped. ``devices_on_cpu``: so many
    devices of CUDA are the CPU; 0 for none. ``socket``: where a replay asks what to run. ``feed``:
    a replay is given rows where the script's loader yields a batch, or where its model is called.
    ``working_folder``: a copy of the user's folder, in which links stand for files that must not be
    written to; "" if the script runs in the user's own. ``plant``: the name of a fault to plant in
    this process; "" for none. ``look_at``: what to watch line by line in the first step that
    counts; None for nothing.
    """

    role: Role
    folder: str
    first_step: int = 0
    steps: int = 3
    float64: bool = False
    without_dropout: bool = False
    devices_on_cpu: int = 0
    socket: str = ""
    feed: Feed = "loader"
    working_folder: str = ""
    plant: str = ""
    look_at: LookAt | None = None

    def write(self, path: Path) -> None:
        """Write it where ``read`` finds it."""
        path.write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, path: Path) -> Told:
        """What was written."""
        found = pickle.loads(path.read_bytes())
        assert isinstance(found, cls)
        return found
