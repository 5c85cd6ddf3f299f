"""The user's command, changed so that it trains in one process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ddp_equivalence.case.errors import BadCase

OF_LAUNCHERS = ("nproc-per-node", "nproc_per_node", "num_processes", "num-processes", "nprocs")
"""Options that say how many processes a launcher starts."""

OPTIONS = (
    *OF_LAUNCHERS,
    *("devices", "trainer.devices", "num_devices", "num-devices", "nproc"),
    *("world-size", "world_size", "num-gpus", "num_gpus", "gpus", "ngpus"),
    *("n-gpus", "n_gpus", "gpu_num", "gpus-per-node", "gpus_per_node"),
)
"""Options of launchers and scripts that may say how many processes train."""

OF_OPTION = re.compile(rf"^-{{0,2}}({'|'.join(map(re.escape, OPTIONS))})(=(?P<value>.*))?$")

RIGHT = (
    "the command that trains in one process, given with --one-process: no number of processes was "
    "found in this one"
)


def in_one_process(command: Sequence[str], world_size: int) -> tuple[str, ...]:
    """The same command with every number of processes replaced by 1.

    Raises BadCase if there is none, and the command is not known to count devices itself.
    """
    found = False
    changed: list[str] = []
    words = list(command)
    while words:
        word = words.pop(0)
        match = OF_OPTION.match(word)
        if match is None:
            changed.append(word)
            continue
        value = match["value"]
        if value is None and words and _is_number(words[0], world_size):
            changed += [word, "1"]
            words.pop(0)
            found = True
        elif value is not None and _is_number(value, world_size):
            changed.append(f"{word.partition('=')[0]}=1")
            found = True
        else:
            changed.append(word)
    if not found and _is_accelerate(command):
        place = next(i for i, word in enumerate(changed) if os.path.basename(word) == "launch") + 1
        changed[place:place] = ["--num_processes", "1"]
        found = True
    changed = [word for word in changed if word not in ("--multi_gpu", "--multi-gpu")]
    if not found:
        raise BadCase("one_process", " ".join(command), RIGHT)
    return tuple(changed)


def processes_in(command: Sequence[str]) -> int | None:
    """The number of processes that a command names in an option; None if it names none."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        match = OF_OPTION.match(word)
        if match is None or match[1] not in (*OF_LAUNCHERS, "devices", "trainer.devices"):
            continue
        value = match["value"] or following
        if value.isdecimal():
            return int(value)
    return None


def _is_number(text: str, world_size: int) -> bool:
    return text in (str(world_size), "gpu", "auto", "cpu")


def _is_accelerate(command: Sequence[str]) -> bool:
    names = [os.path.basename(word) for word in command]
    return "launch" in names and any("accelerate" in name for name in names)
