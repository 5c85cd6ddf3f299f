"""Asks the ranks of a script that has not come to its end where they are, and in what they wait."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddp_equivalence.measurement.code_lines import is_shown, is_users
from ddp_equivalence.observed_scripts.in_script.stacks import PROCESS, SIGNAL, STACKS
from ddp_equivalence.observed_scripts.places import Place

SECONDS_APART = 1.0
"""A rank that is at the same place twice, so long apart, inside a collective, waits there."""

FRAME = re.compile(r'^ +File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
COLLECTIVES, DDP = f"{os.sep}torch{os.sep}distributed{os.sep}", "nn/parallel/distributed.py"
BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class RankPlace:
    """``place``: the line of the user's code. ``waits_in``: the function of torch in which it waits
    for other ranks; "" if it does not. ``gone``: its process has ended.
    """

    place: Place = field(default_factory=Place)
    waits_in: str = ""
    gone: bool = False

    def __str__(self) -> str:
        if self.gone:
            return "has ended"
        at = f"at {self.place}" if self.place.file else "at a line that is not known"
        return f"waits in {self.waits_in} {at}" if self.waits_in else f"is {at}"


def where_ranks_are(folder: Path) -> dict[int, RankPlace]:
    """By rank. ``folder``: of the record."""
    ranks = {int(one.parent.name[4:]): one.parent for one in folder.glob(f"rank*/{PROCESS}")}
    looks = []
    for number in range(2):
        time.sleep(SECONDS_APART * number)
        for at in ranks.values():
            with suppress(ProcessLookupError):
                os.kill(int((at / PROCESS).read_text()), SIGNAL)
        time.sleep(SECONDS_APART)
        looks.append({rank: _place(at) for rank, at in ranks.items()})
    before, now = looks
    return {
        rank: RankPlace(one.place, one.waits_in if one == before[rank] else "", one.gone)
        for rank, one in sorted(now.items())
    }


def _place(folder: Path) -> RankPlace:
    """From the last stack of the main thread, which faulthandler writes last."""
    if not _runs(int((folder / PROCESS).read_text())):
        return RankPlace(gone=True)
    stack = (folder / STACKS).read_text().rpartition("(most recent call first)")[2]
    frames = [Place(file, int(line), name) for file, line, name in FRAME.findall(stack)]
    shown = [one for one in frames if is_shown(one.file)]
    line = next((one for one in frames if is_users(one.file)), shown[0] if shown else Place())
    inside = frames[: frames.index(shown[0])] if shown else frames
    calls = [one.function for one in inside if COLLECTIVES in one.file]
    calls = [one for one in calls if one != "wrapper"]
    calls += ["DDP's forward" for one in inside if one.file.endswith(DDP)]
    calls += ["the reduction of backward" for one in inside if one.function == BACKWARD]
    file = os.path.realpath(line.file) if line.file else ""
    return RankPlace(Place(file, line.number, line.function), calls[-1] if calls else "")


def _runs(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
