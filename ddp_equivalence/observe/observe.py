"""``observe`` runs a training script as it is, and says whether its ranks train like one process.

The script runs twice. First its ranks are recorded for a few steps. Then the same script computes
the same steps in one process, from the recorded weights, on the rows that all ranks read.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.check_equivalence import raise_unless_same
from ddp_equivalence.observe.as_case import ObservedStep
from ddp_equivalence.observe.judged_step import Script, judge, name_of_script
from ddp_equivalence.observe.launch import Running
from ddp_equivalence.observe.looked_at_closer import observations_of_second_run
from ddp_equivalence.observe.one_process import in_one_process, processes_in
from ddp_equivalence.observe.oracle import Oracle
from ddp_equivalence.observe.record import Record
from ddp_equivalence.observe.report import StepFacts, report_lines
from ddp_equivalence.observe.told import LookAt, Told
from ddp_equivalence.report.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Observed:
    """What ``observe`` found. ``verdicts``: one for each recorded step. ``command``,
    ``one_process``: what was run on the ranks and in one process. ``seconds``: what recording and
    replaying took.
    """

    command: tuple[str, ...]
    one_process: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    seconds: tuple[float, float]
    float64: bool
    name: str
    world_size: int
    facts: tuple[StepFacts, ...]
    on_cpu: bool = False
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """That of the first step that is different, else unknown, else of the last one."""
        for outcome in ("different", "unknown"):
            for verdict in self.verdicts:
                if verdict.outcome == outcome:
                    return verdict
        return self.verdicts[-1]

    @property
    def outcome(self) -> Outcome:
        """ "same", "different", or "unknown"."""
        return self.verdict.outcome

    def __str__(self) -> str:
        return "".join(f"{line.text}\n" for line in report_lines(self))

    def assert_equivalent(self) -> Observed:
        """Raises NotEquivalent or NothingCompared, unless every step is the same."""
        __tracebackhide__ = True
        raise_unless_same(self.verdict)
        return self


RAGGED = (
    "nothing was dropped in either run: the ranks have padded their rows to other lengths, and "
    "then one process cannot drop the same elements"
)


class ScriptFailed(RuntimeError):
    """The script ended, or took too long, before it had made the steps to record."""


@dataclass(frozen=True)
class Options:
    """``steps``: how many optimizer steps are recorded, beginning at ``first_step`` (from 0).
    ``one_process``: the command that trains in one process, if it cannot be told. ``precision``:
    "float64", "own", or "auto" for float64 unless the script cannot compute in it. ``dropout``:
    False drops nothing. ``as_cpu``: so many CUDA devices are the CPU; 0 for none, -1 for as many as
    the command starts processes. ``folder``: where
    the command runs. ``keep``: a folder for the record, which is deleted otherwise. ``deadline``:
    seconds that recording may take, and each step of the replay.
    """

    steps: int = 3
    first_step: int = 0
    one_process: Sequence[str] | str | None = None
    precision: str = "auto"
    dropout: bool = True
    as_cpu: int = 0
    folder: Path = Path()
    keep: Path | None = None
    deadline: float = 600.0


def observe(command: Sequence[str] | str, options: Options | None = None) -> Observed:
    """Run the command on its ranks and in one process, and compare."""
    options = options or Options()
    words = tuple(shlex.split(command) if isinstance(command, str) else command)
    if options.as_cpu < 0:
        options = replace(options, as_cpu=processes_in(words) or 2)
    if not words:
        raise BadCase("command", command, "a command that trains, such as torchrun ... train.py")
    scratch = options.keep or Path(tempfile.mkdtemp(prefix="observed-"))
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        return _observed(words, options, scratch.resolve())
    finally:
        if options.keep is None:
            shutil.rmtree(scratch, ignore_errors=True)


def _observed(command: tuple[str, ...], options: Options, scratch: Path) -> Observed:
    started = time.monotonic()
    record, float64 = _recorded(command, options, scratch)
    notes = []
    if options.dropout and record.ragged_and_drawn():
        notes.append(RAGGED)
        options = replace(options, dropout=False)
        folder = scratch / "without_dropout"
        folder.mkdir()
        record, why = _run(command, _told(options, folder, float64), options, folder)
        if not record.steps:
            raise ScriptFailed(why)
    recorded = time.monotonic()
    given = options.one_process
    if given is None:
        alone = in_one_process(command, record.world_size)
    else:
        alone = tuple(shlex.split(given) if isinstance(given, str) else given)
    told = Told(
        role="replay",
        folder=str(record.folder),
        steps=len(record.steps),
        float64=float64,
        without_dropout=not options.dropout,
        # A launcher says how many processes train; other scripts count devices.
        devices_on_cpu=options.as_cpu if alone != command else min(1, options.as_cpu),
        socket=str(scratch / "questions"),
        feed=record.feed,
    )
    run = record.runs[0]
    script = Script(
        name=name_of_script(command, run["main"]),
        main=Path(run["main"]) if run["main"] else None,
        backend="gloo",
        float64=float64,
        on_cpu=bool(options.as_cpu),
        steps=len(record.steps),
        repeat=f"ddp-equivalence observe -- {shlex.join(command)}",
    )
    oracle = Oracle(alone, options.folder, record, told, options.deadline)

    def run_again(look_at: LookAt, number: int) -> Record:
        folder = scratch / "closer"
        folder.mkdir()
        first = options.first_step + number
        told = _told(options, folder, float64, first_step=first, steps=1, look_at=look_at)
        return _run(command, told, options, folder)[0]

    looked_closer = False
    try:
        verdicts, facts = [], []
        for group in record.groups:
            for number in group:
                step = ObservedStep(record, oracle, number, group, record.rows(group))
                verdict = judge(script, step)
                if verdict.outcome == "different" and not looked_closer:
                    looked_closer = True
                    seen = observations_of_second_run(step, verdict, run_again)
                    verdict = judge(script, step, seen) if seen else verdict
                verdicts.append(verdict)
                facts.append(StepFacts.of(step))
                _ = str(verdict), verdict.full_report()  # asks the script all that it needs
    finally:
        oracle.close()
    ended = time.monotonic()
    return Observed(
        command=command,
        one_process=alone,
        verdicts=tuple(verdicts),
        seconds=(recorded - started, ended - recorded),
        float64=float64,
        name=script.name,
        world_size=record.world_size,
        facts=tuple(facts),
        on_cpu=script.on_cpu,
        notes=(*notes, *_notes(oracle)),
    )


def _notes(oracle: Oracle) -> tuple[str, ...]:
    """What a reader must know of how the replay was done."""
    notes = []
    if oracle.arrangement != "side by side":
        notes.append(f"in one process the script takes the micro-batches {oracle.arrangement}")
    for operation, count in oracle.missed.items():
        notes.append(f"{operation} drew other numbers than the ranks, {count} times")
    return tuple(notes)


def _recorded(
    command: tuple[str, ...], options: Options, scratch: Path
) -> tuple[Record, bool]:
    """The record, and whether the script computed in float64."""
    tries = {"auto": (True, False), "float64": (True,), "own": (False,)}
    if options.precision not in tries:
        raise BadCase("precision", options.precision, f"one of {', '.join(tries)}")
    ended = ""
    for float64 in tries[options.precision]:
        folder = scratch / ("float64" if float64 else "own")
        folder.mkdir()
        record, ended = _run(command, _told(options, folder, float64), options, folder)
        if record.steps:
            return record, float64
    raise ScriptFailed(ended)


def _told(options: Options, folder: Path, float64: bool, **more: Any) -> Told:
    """What the ranks are told. ``more``: fields of ``Told`` that are not as in the options."""
    told = Told(
        role="record",
        folder=str(folder),
        first_step=options.first_step,
        steps=options.steps,
        float64=float64,
        without_dropout=not options.dropout,
        devices_on_cpu=options.as_cpu,
    )
    return replace(told, **more)


def _run(
    command: tuple[str, ...], told: Told, options: Options, folder: Path
) -> tuple[Record, str]:
    """Run until every rank has recorded its steps, or the script ends."""
    running = Running(command, told, options.folder, folder / "record.log")
    try:
        while running.exit_code is None and not _all_done(folder):
            if time.monotonic() - running.started > options.deadline:
                break
            time.sleep(0.02)
        for _ in range(200):  # torchrun ends by itself when its ranks have ended
            if running.exit_code is not None:
                break
            time.sleep(0.01)
    finally:
        running.end()
    record = Record(folder)
    why = _why_not(running, record, options)
    return record, why


def _why_not(running: Running, record: Record, options: Options) -> str:
    """Why too little was recorded, in words."""
    code = running.exit_code
    if code is None or code < 0:
        end = f"was ended after {options.deadline:g} s"
    else:
        end = f"ended with exit code {code}"
    printed = f"It printed last:\n{running.last_words}"
    if code == 0 and record.runs:
        return (
            f"The command {end}, and not every rank had made a step of an optimizer. {printed}"
        )
    if code == 0:
        return f"The command {end}, and no process had made a step of an optimizer. {printed}"
    return f"The command {end} before every rank had made a step of an optimizer. {printed}"


def _all_done(folder: Path) -> bool:
    record = Record(folder)
    return record.world_size > 0 and all(
        (folder / f"rank{rank}" / "done").exists() for rank in range(record.world_size)
    )
