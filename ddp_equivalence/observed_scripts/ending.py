"""How a script ended that has not made all steps that were asked for, and where it hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from ddp_equivalence.case.errors import what_is_hidden
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.calls import CodeLine, is_shown, is_users
from ddp_equivalence.observed_scripts.in_script.recorder import STACKS
from ddp_equivalence.observed_scripts.record import Record, rank_folder, text_of_line
from ddp_equivalence.observed_scripts.seen_in_record import lines_at, seen
from ddp_equivalence.report.text import rank_names
from ddp_equivalence.report.verdict import Outcome, Verdict, unknown


class ScriptFailed(RuntimeError):
    """The script ended, or took too long, before it had made the steps to record."""


def all_done(folder: Path) -> bool:
    """True if all ranks have made the steps which were to be recorded."""
    record = Record(folder)
    return len(_ranks_that_are_done(record)) == record.world_size > 0


def _ranks_that_are_done(record: Record) -> list[int]:
    """The ranks that have made the steps which were to be recorded."""
    ranks = range(record.world_size)
    return [rank for rank in ranks if (rank_folder(record.folder, rank) / "done").exists()]


def failed(record: Record, end: Ending | None) -> ScriptFailed:
    """Says why no step was made by all ranks."""
    assert end is not None
    alone = ""
    if done := _ranks_that_are_done(record):
        alone = (
            f" Only {rank_names(done)} made them. If one rank trains something alone at first, "
            "such as a teacher, let it do that in a run of its own before this one."
        )
    hidden = what_is_hidden(Path.cwd(), end.printed)
    return ScriptFailed(f"{end.sentence}.{alone} It printed last:\n{end.printed}{hidden}")


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
    """``place``: the line of the user's code, if it is known. ``waits_in``: that in which it waits
    for other ranks; "" if it does not. ``has_ended``: its process has ended.
    """

    place: CodeLine | None = None
    waits_in: str = ""
    has_ended: bool = False

    def __str__(self) -> str:
        if self.has_ended:
            return "has ended"
        doing = f"waits in {self.waits_in}" if self.waits_in else "is"
        return f"{doing} at {text_of_line(self.place) or 'an unknown line'}"


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
        """The outcome for the script as a whole. Ranks that wait in different collectives, or for
        one that has ended, would wait for ever. A rank that does something else may come yet.
        """
        if self.code is not None:
            return "same" if self.code == 0 and len(set(self.made)) <= 1 else "unknown"
        at = set(self.ranks.values())
        stuck = all(one.waits_in or one.has_ended for one in at)
        is_fault = stuck and len(at) > 1 and len(self.ranks) == len(self.made)
        return "different" if is_fault else "unknown"

    @property
    def sentence(self) -> str:
        """How the script ended, after how many steps, and where its ranks were then."""
        each = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(self.made))
        apart = f" ({each})" if len(set(self.made)) > 1 else ""
        made = min(self.made, default=0)
        after = f"after {made} of the {self.asked} steps that were asked for{apart}"
        if self.code is None:
            places = "".join(f"; rank {rank} {one}" for rank, one in self.ranks.items())
            return f"the script was ended after {self.seconds:g} s, {after}{places}"
        if self.code == 0:
            return f"the script ended by itself {after}"
        return f"the script failed {after}, with exit code {self.code}"

    def __str__(self) -> str:
        return f"{self.sentence}; it printed last:\n{self.printed}" if self.code else self.sentence

    def verdict(self, name: str, last: Verdict) -> Verdict | None:
        """On the script as a whole; None if nothing is wrong. ``last``: on its last step."""
        if self.outcome == "same":
            return None
        last = replace(last, subject=f"{name}, after step {min(self.made)} of {self.asked}")
        if self.outcome == "unknown":
            hung = self.code is None
            because = UnknownBecause.RANKS_TIMED_OUT if hung else UnknownBecause.RANK_FAILED
            return replace(unknown(last, Unknown(because, str(self))), cause=None)
        finding = seen(
            "ranks_wait_for_each_other",
            str(self),
            "let all ranks make the same steps: decide together when they stop, from values "
            "that are reduced over the ranks.",
            [
                line
                for rank, one in self.ranks.items()
                for line in lines_at(one.place, f"rank {rank} waits in {one.waits_in}")
            ],
        )
        return replace(last, outcome="different", cause=finding.cause, findings=(finding,))


def where_ranks_are(record: Record) -> dict[int, RankPlace]:
    """The places of the ranks that have called their models, and run or ran."""
    before, now = (_look(record) for _ in range(2))
    return {
        rank: one if one == before[rank] else replace(one, waits_in="") for rank, one in now.items()
    }


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
            frames = [CodeLine(file, int(line), name) for file, line, name in FRAME.findall(last)]
            shown = [one for one in frames if is_shown(one.file)]
            line = next((one for one in shown if is_users(one.file)), next(iter(shown), None))
            inside = frames[: frames.index(shown[0])] if shown else frames
            waits = (
                what or frame.function
                for function, file, what in WAITING
                for frame in reversed(inside)
                if function in frame.function and file in frame.file
                if frame.function != "wrapper"
            )
            at = line and replace(line, file=os.path.realpath(line.file))
            return RankPlace(at, next(waits, ""))
    return RankPlace(has_ended=True)
