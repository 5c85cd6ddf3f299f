"""Says how a script ended that has not made all steps that were asked for, and where it hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.code_lines import is_shown, is_users
from ddp_equivalence.observed_scripts.differences_between_ranks import lines_at
from ddp_equivalence.observed_scripts.in_script.rank_of_process import STACKS
from ddp_equivalence.observed_scripts.places import Place
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recorded_step import rank_folder
from ddp_equivalence.report.unknown_verdicts import unknown
from ddp_equivalence.report.verdict import Outcome, Verdict

SECONDS_APART = 1.0
"""A rank that is at the same place of a collective twice, so long apart, waits there."""

FRAME = re.compile(r'^ +File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
WAITING = (
    ("_engine_run_backward", "", "the reduction of backward"),
    ("", "/torch/nn/parallel/distributed.py", "DDP's forward"),
    ("", "/torch/distributed/", ""),
)
"""The function and the file of a frame that waits for other ranks, and in what; "" for any function
or file, and for the name of the outermost function.
"""


@dataclass(frozen=True)
class RankPlace:
    """``place``: the line of the user's code; None if the process has ended. ``waits_in``: that in
    which it waits for other ranks; "" if it does not.
    """

    place: Place | None
    waits_in: str = ""

    def __str__(self) -> str:
        if self.place is None:
            return "has ended"
        return (
            f"waits in {self.waits_in} at {self.place}" if self.waits_in else f"is at {self.place}"
        )


@dataclass(frozen=True)
class Ending:
    """``code``: with which the command exited; None if it was ended after ``seconds``. ``asked``:
    the steps that it was to make. ``made``: those that each rank made. ``printed``: the last lines.
    ``ranks``: where each rank was that has called its model, if the command was ended.
    """

    code: int | None
    seconds: float
    asked: int
    made: Sequence[int]
    printed: str
    ranks: Mapping[int, RankPlace] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """What it shows of the script. Ranks that wait in different collectives, or for one that
        has ended, would wait for ever. A rank that does something else may come yet.
        """
        if self.code is not None:
            return "same" if self.code == 0 and len(set(self.made)) <= 1 else "unknown"
        at = set(self.ranks.values())
        stuck = all(one.waits_in or one.place is None for one in at)
        is_fault = stuck and len(at) > 1 and len(self.ranks) == len(self.made)
        return "different" if is_fault else "unknown"

    def __str__(self) -> str:
        each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(self.made))
        apart = f" ({each})" if len(set(self.made)) > 1 else ""
        after = f"after {min(self.made)} of the {self.asked} steps that were asked for{apart}"
        if self.code is None:
            return f"the script was ended after {self.seconds:g} s, {after}{self.places}"
        if self.code == 0:
            return f"the script ended by itself {after}"
        code = f"with exit code {self.code}"
        return f"the script failed {after}, {code}; it printed last:\n{self.printed}"

    @property
    def places(self) -> str:
        """Where the ranks were, as the end of a sentence."""
        return "".join(f"; rank {rank} {one}" for rank, one in self.ranks.items())

    def verdict(self, name: str, last: Verdict) -> Verdict | None:
        """On the script as a whole; None if nothing is wrong. ``last``: on its last step."""
        if self.outcome == "same":
            return None
        last = replace(last, subject=f"{name}, after step {min(self.made)} of {self.asked}")
        if self.outcome == "unknown":
            hung = self.code is None
            because = UnknownBecause.RANKS_TIMED_OUT if hung else UnknownBecause.RANK_FAILED
            return replace(unknown(last, Unknown(because, str(self))), cause=None)
        finding = Finding(
            cause="ranks_wait_for_each_other",
            sentence="ranks wait for each other in different collectives, or for one that has left",
            look_at="what decides how many steps a rank makes: it must be the same on all ranks",
            accepted=True,
            headline=str(self),
            fix="let all ranks make the same steps: decide together when they stop, from values "
            "that are reduced over the ranks.",
            lines=tuple(
                line
                for rank, one in self.ranks.items()
                for line in lines_at(one.place or Place(), f"rank {rank} waits in {one.waits_in}")
            ),
        )
        return replace(last, outcome="different", cause=finding.cause, findings=(finding,))


def where_ranks_are(record: Record) -> dict[int, RankPlace]:
    """The places of the ranks that have called their models, and run or ran."""
    before, now = (_look(record) for _ in range(2))
    return {rank: one if one == before[rank] else RankPlace(one.place) for rank, one in now.items()}


def _look(record: Record) -> dict[int, RankPlace]:
    for rank, run in record.runs.items():
        stacks = rank_folder(record.folder, rank) / STACKS
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(run["process"])
            # No other process may get the signal, which would end it: neither one that has the
            # number of a rank that has ended, nor a script that uses the signal itself.
            if stacks.exists() and process.create_time() < stacks.stat().st_ctime:
                process.send_signal(signal.SIGUSR1)
    time.sleep(SECONDS_APART)
    return {rank: _place(record, rank) for rank in record.runs}


def _place(record: Record, rank: int) -> RankPlace:
    """From the last stack that faulthandler has written, which is that of the main thread."""
    process, stacks = record.runs[rank]["process"], rank_folder(record.folder, rank) / STACKS
    with suppress(psutil.NoSuchProcess):
        if psutil.Process(process).status() != psutil.STATUS_ZOMBIE and stacks.exists():
            last = stacks.read_text().rpartition("(most recent call first)")[2]
            frames = [Place(file, int(line), name) for file, line, name in FRAME.findall(last)]
            shown = [one for one in frames if is_shown(one.file)] or [Place()]
            line = next((one for one in shown if is_users(one.file)), shown[0])
            inside = frames[: frames.index(shown[0])] if shown[0].file else frames
            calls = [
                what or one.function
                for function, file, what in WAITING
                for one in reversed(inside)
                if one.function in (function or one.function)
                and file in one.file
                and one.function != "wrapper"
            ]
            at = replace(line, file=os.path.realpath(line.file)) if line.file else line
            return RankPlace(at, calls[0] if calls else "")
    return RankPlace(None)
