"""Lets the ranks of a script run until they have recorded their steps."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict

import psutil

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.unknown import Unknown, UnknownBecause
from ddp_equivalence.measurement.calls import is_shown, is_users
from ddp_equivalence.observed_scripts.in_script.recorder import STACKS
from ddp_equivalence.observed_scripts.launch import Running, copy_of_links, with_own_scripts
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recorded_step import Place, rank_folder
from ddp_equivalence.observed_scripts.seen_in_record import lines_at, seen
from ddp_equivalence.observed_scripts.told import Told
from ddp_equivalence.report.text import rank_names
from ddp_equivalence.report.verdict import Outcome, Verdict, unknown

SECONDS_TO_END = 3.0
"""A launcher gets this long to end by itself when its ranks have ended."""


class ScriptFailed(RuntimeError):
    """The script ended, or took too long, before it had made the steps to record."""


class Recording:
    """``command``: trains on the ranks. ``scratch``: a folder for everything that is written."""

    def __init__(self, command: Sequence[str], options: Options, scratch: Path) -> None:
        self._command, self._options, self._scratch = tuple(command), options, scratch

    def first(self) -> tuple[Record, bool, Ending | None]:
        """The record of the steps, whether it was made in float64, and how the script ended if it
        did not make all of them. Raises ScriptFailed.
        """
        tries = {"auto": (True, False), "float64": (True,), "own": (False,)}
        found: list[tuple[Record, bool, Ending | None]] = []
        for float64 in tries[self._options.precision]:
            record, end = self._run(float64=float64)
            found.append((record, float64, end))
            if record.steps and (end is None or not end.code):
                break
        best = max(found, key=lambda one: len(one[0].steps))
        if not best[0].steps:
            raise _failed(record, end)
        return best

    def again(self, **told: Any) -> Record:
        """Another record. ``told``: fields of ``Told``.

        Raises ScriptFailed.
        """
        record, why = self._run(**told)
        if not record.steps:
            raise _failed(record, why)
        return record

    def _run(self, **more: Any) -> tuple[Record, Ending | None]:
        """The record, and how the script ended before it had made the steps, if it did."""
        options = self._options
        folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=self._scratch))
        at = working_folder(options, folder)
        told = Told(
            role="record",
            folder=str(folder),
            first_step=options.from_step,
            steps=options.steps,
            without_dropout=not options.dropout,
            devices_on_cpu=options.as_cpu,
            working_folder="" if options.in_place else str(at),
            plant=options.plant,
        )
        command = with_own_scripts(self._command, Path(options.folder))
        running = Running(command, replace(told, **more), at, folder / "record.log")
        record = Record(folder)
        try:
            while running.exit_code is None and not _all_done(folder):
                if time.monotonic() - running.started > options.deadline:
                    break
                time.sleep(0.02)
            ended = time.monotonic() + SECONDS_TO_END
            while running.exit_code is None and _all_done(folder) and time.monotonic() < ended:
                time.sleep(0.01)
            code = running.exit_code
            hangs = code is None and not _all_done(folder)
            places = where_ranks_are(Record(folder)) if hangs else {}
        finally:
            running.end()
        record = Record(folder)
        made = record.steps_by_rank
        if len(record.steps) >= replace(told, **more).steps or _all_done(folder):
            return record, None
        words = running.last_words
        return record, Ending(code, options.deadline, options.steps, made, words, places)


def working_folder(options: Options, beside: Path) -> Path:
    """Where a command runs: in the user's folder, or in a new copy of it made of links."""
    if options.in_place:
        return Path(options.folder)
    copy = beside / "working_folder"
    copy_of_links(Path(options.folder), copy)
    return copy


def _all_done(folder: Path) -> bool:
    record = Record(folder)
    return len(_ranks_that_are_done(record)) == record.world_size > 0


def _ranks_that_are_done(record: Record) -> list[int]:
    """The ranks that have made the steps which were to be recorded."""
    ranks = range(record.world_size)
    return [rank for rank in ranks if (rank_folder(record.folder, rank) / "done").exists()]


def _failed(record: Record, end: Ending | None) -> ScriptFailed:
    """Says why no step was made by all ranks."""
    assert end is not None
    what = f"did not make {end.asked} steps of an optimizer within {end.seconds:g} s{end.places}"
    if end.code is not None:
        made = "had made the steps that were to be recorded"
        what = f"ended with exit code {end.code} before every rank {made}"
    alone = ""
    if done := _ranks_that_are_done(record):
        alone = (
            f" Only {rank_names(done)} made them. If one rank trains something alone at first, "
            "such as a teacher, let it do that in a run of its own before this one."
        )
    return ScriptFailed(f"The command {what}.{alone} It printed last:\n{end.printed}")


# Says how a script ended that has not made all steps that were asked for, and where it hangs.

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
        finding = seen(
            "ranks_wait_for_each_other",
            str(self),
            "let all ranks make the same steps: decide together when they stop, from values "
            "that are reduced over the ranks.",
            [
                line
                for rank, one in self.ranks.items()
                for line in lines_at(one.place or Place(), f"rank {rank} waits in {one.waits_in}")
            ],
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
            waits = (
                what or frame.function
                for function, file, what in WAITING
                for frame in reversed(inside)
                if function in frame.function and file in frame.file
                if frame.function != "wrapper"
            )
            at = replace(line, file=os.path.realpath(line.file)) if line.file else line
            return RankPlace(at, next(waits, ""))
    return RankPlace(None)


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
