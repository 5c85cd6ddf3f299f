"""What the processes of an observed script are told, and where they leave what they saw."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

VARIABLE = "DDP_EQUIVALENCE_OBSERVE"
"""The environment variable that names the file with ``Told``."""

Role = Literal["record", "replay"]
Feed = Literal["loader", "calls"]


@dataclass(frozen=True)
class Told:
    """``role``: record what the ranks do, or replay it in one process.

    ``folder``: where records are written, and read from. ``first_step``, ``steps``: the number of
    the first optimizer step that counts, from 0, and how many are recorded. ``float64``: everything
    is computed in float64. ``without_dropout``: nothing is dropped. ``devices_on_cpu``: so many
    devices of CUDA are the CPU; 0 for none. ``socket``: where a replay asks what to run. ``feed``:
    a replay is given rows where the script's loader yields a batch, or where its model is called.
    ``watched``: the step that is watched line by line; -1 for none.
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
    watched: int = -1
    plant: str = ""

    def write(self, path: Path) -> None:
        """Write it where ``read`` finds it."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Told:
        """What was written."""
        return cls(**json.loads(path.read_text()))
