"""The flow of ``observe``: record the ranks, replay in one process, judge, look closer."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.observed_scripts.arrangements import (
    AT_ONCE,
    JOINED_AND_REPEATED,
    ONE_AFTER_THE_OTHER,
    SIDE_BY_SIDE,
    Arrangement,
)
from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.end_of_epoch import about_epochs
from ddp_equivalence.observed_scripts.export import export
from ddp_equivalence.observed_scripts.judged_step import judge, rows_may_be_elsewhere
from ddp_equivalence.observed_scripts.launch import short_folder
from ddp_equivalence.observed_scripts.looked_at_closer import (
    SecondRun,
    is_the_same,
    second_run,
)
from ddp_equivalence.observed_scripts.measured_step import (
    SECONDS_TO_EXPLAIN,
    Script,
    name_of_script,
)
from ddp_equivalence.observed_scripts.observed import Observed
from ddp_equivalence.observed_scripts.one_process import in_one_process
from ddp_equivalence.observed_scripts.options import Options, words_of
from ddp_equivalence.observed_scripts.oracle import Oracle
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recording import Recording, ScriptFailed, working_folder
from ddp_equivalence.observed_scripts.report import render
from ddp_equivalence.observed_scripts.rows_read_twice import read_by_several_ranks
from ddp_equivalence.observed_scripts.step_facts import StepFacts
from ddp_equivalence.observed_scripts.steps_of_record import compute_in_their_order, observed_steps
from ddp_equivalence.observed_scripts.told import LookAt, Told
from ddp_equivalence.observed_scripts.working_folder import with_own_scripts
from ddp_equivalence.report.short.headline import headline_text
from ddp_equivalence.report.verdict import Verdict

NOT_REPEATED = (
    "the ranks could not be watched a second time: they read other rows then, or had other "
    "weights. Seed what the script draws"
)

RAGGED = (
    "nothing was dropped in either run: the ranks have padded their rows to other lengths, and "
    "then one process cannot drop the same elements"
)


@dataclass
class ScriptObservation:
    """``command``: starts the ranks. ``scratch``: a folder for what is recorded."""

    command: tuple[str, ...]
    options: Options
    scratch: Path

    def __post_init__(self) -> None:
        self.recording = Recording(self.command, self.options, self.scratch)

    def observed(self) -> Observed:
        """Do it. Raises BadCase and ScriptFailed."""
        started = time.monotonic()
        show("the ranks train")
        record, self.float64, ending = self.recording.first()
        self.notes: list[str] = []
        record = self._without_ragged_dropout(record)
        recorded = time.monotonic()
        show("one process trains")
        alone = self.in_one_process(record)
        script = self._script(record, recorded - started)
        self.has_explained = self.has_looked_closer = False
        self.exported: Path | None = None
        before = list(self.notes)
        verdicts = self._judged(script, record, alone, SIDE_BY_SIDE)
        if rows_may_be_elsewhere(verdicts) and record.may_be_time_first:
            record, verdicts = self._with_rows_in_dim_1(script, record, alone, verdicts, before)
        if self.options.flat is not None and all(one.outcome == "same" for one in verdicts):
            alone = words_of(self.options.flat, "flat")
            self.notes.append("without accumulation, all rows of a step as one batch")
            verdicts = self._judged(script, record, alone, AT_ONCE)
        self._move_what_was_exported()
        about_rows = read_by_several_ranks(record), *about_epochs(record)
        self.notes += [note for note in about_rows if note and not self.options.plant]
        if self.options.plant:
            self.notes.append(f"{self.options.plant} was planted in the ranks, on purpose")
        end = None if ending is None else ending.verdict(script.name, verdicts[-1])
        if ending and (end is None or {one.outcome for one in verdicts} != {"same"}):
            self.notes.append(str(ending))
        return Observed(
            name=script.name,
            verdicts=tuple(verdicts),
            facts=tuple(StepFacts.of(step) for step in observed_steps(record, None)),
            command=self.command,
            one_process=alone,
            world_size=record.world_size,
            seconds=(recorded - started, time.monotonic() - recorded),
            float64=self.float64,
            on_cpu=script.on_cpu,
            notes=tuple(dict.fromkeys(self.notes)),
            render=render,
            ending=end,
            draws_alike=self.alike,
        )

    def _without_ragged_dropout(self, record: Record) -> Record:
        """Another record, without dropout, if one process could not drop what the ranks did."""
        if not self.options.dropout or not record.ragged_and_drawn():
            return record
        self.notes.append(RAGGED)
        self.options = replace(self.options, dropout=False)
        self.recording = Recording(self.command, self.options, self.scratch)
        return Record(self.recording.again(float64=self.float64).folder, record.time_first)

    def _with_rows_in_dim_1(
        self,
        script: Script,
        record: Record,
        alone: Sequence[str],
        verdicts: list[Verdict],
        before: list[str],
    ) -> tuple[Record, list[Verdict]]:
        """The record and the verdicts if batches have their rows in dim 1; those that were given,
        if they do not. ``before``: what there was to note without a verdict.
        """
        usual = dict(vars(self))
        self.notes, self.exported = before, None
        self.has_explained = self.has_looked_closer = False
        with suppress(ScriptFailed):
            other = self._without_ragged_dropout(Record(record.folder, time_first=True))
            found = self._judged(script, other, alone, SIDE_BY_SIDE)
            if not rows_may_be_elsewhere(found):
                self.notes.append("the batches have the time in dim 0, and their rows in dim 1")
                return other, found
        vars(self).update(usual)
        return record, verdicts

    def in_one_process(self, record: Record) -> tuple[str, ...]:
        """The command that trains in one process. Raises BadCase if it is not known."""
        if record.world_size == 1:
            right = "a command that trains on several ranks; this one trained on one"
            raise BadCase("command", shlex.join(self.command), right)
        if self.options.one_process is not None:
            return words_of(self.options.one_process, "one_process")
        try:
            return in_one_process(self.command, record.world_size)
        except BadCase:
            if self.options.as_cpu:  # the script counts its devices, and is given one
                return self.command
            raise

    def _script(self, record: Record, seconds: float) -> Script:
        main = record.runs[0]["main"]
        return Script(
            name=name_of_script(self.command, main),
            backend=record.runs[0]["backend"] or "gloo",
            float64=self.float64,
            on_cpu=bool(self.options.as_cpu),
            steps=len(record.steps),
            seconds=max(SECONDS_TO_EXPLAIN, round(seconds)),
            repeat=f"ddp-equivalence observe {self.options.words()}-- {shlex.join(self.command)}",
        )

    def _judged(
        self, script: Script, record: Record, alone: Sequence[str], arrangement: Arrangement
    ) -> list[Verdict]:
        """A verdict on every step."""
        name = f"{arrangement} in dim 1" if record.time_first else arrangement
        folder = self.scratch / name.replace(" ", "_")
        folder.mkdir()
        at = working_folder(self.options, folder)
        socket_folder = tempfile.mkdtemp(prefix="obs", dir=short_folder())
        try:
            told = self._told_to_replay(record, alone, at, Path(socket_folder) / "socket")
            command = with_own_scripts(alone, Path(self.options.folder))
            log = folder / "one_process.log"
            oracle = Oracle(command, at, log, record, told, self.options.deadline, arrangement)
            try:
                steps = observed_steps(record, oracle)
                compute_in_their_order(steps, self.options.from_step)
                return [self._verdict(script, step) for step in steps]
            finally:
                oracle.close()
                self.notes += _notes(oracle)
                self.alike = tuple(oracle.alike)
        finally:
            shutil.rmtree(socket_folder, ignore_errors=True)

    def _told_to_replay(self, record: Record, alone: Sequence[str], at: Path, socket: Path) -> Told:
        """What the one process is told. ``at``: where it runs. ``socket``: where it asks."""
        return Told(
            role="replay",
            folder=str(record.folder),
            steps=len(record.steps),
            float64=self.float64,
            without_dropout=not self.options.dropout,
            time_first=record.time_first,
            # A launcher says how many processes train; other scripts count devices.
            devices_on_cpu=self.options.as_cpu
            if tuple(alone) != self.command
            else min(1, self.options.as_cpu),
            socket=str(socket),
            feed=record.feed,
            working_folder="" if self.options.in_place else str(at),
        )

    def _verdict(self, script: Script, step: ObservedStep) -> Verdict:
        verdict = judge(script, step, None if self.has_explained else self._look_closer)
        if not self.has_explained:
            verdict.full_report()  # asks the script everything, while it runs
        if verdict.outcome == "different" and not self.has_explained:
            self.has_explained = True
            self._export(step, verdict)
        return verdict

    def _export(self, step: ObservedStep, verdict: Verdict) -> None:
        """Write the step to files, if the user wants that."""
        if self.options.export is None or step.oracle is None:
            return
        folder = Path(tempfile.mkdtemp(prefix="exported_", dir=self.scratch)) / "step"
        alone = shlex.join(step.oracle.command)
        self.exported = export(
            step, folder, headline_text(verdict), shlex.join(self.command), alone
        )

    def _move_what_was_exported(self) -> None:
        """To where the user wants it, once it is known that this is how the rows lie."""
        if self.exported is None or self.options.export is None:
            return
        folder = Path(self.options.export)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.exported.parent, folder)
        script = folder / self.exported.name
        self.notes.append(f"the step is in {folder}; python {script} compares what it holds")

    def _look_closer(self, step: ObservedStep, verdict: Verdict) -> SecondRun:
        if self.has_looked_closer:
            return SecondRun()  # once is enough: the steps of a script are made by the same lines
        self.has_looked_closer = True

        def run_again(look_at: LookAt, number: int) -> Record | None:
            assert step.oracle is not None
            record = self._run_again(look_at, number, step.oracle)
            if is_the_same(step, record):
                return record
            self.notes.append(NOT_REPEATED)
            return None

        try:
            return second_run(step, verdict, run_again)
        except ScriptFailed as error:
            why = str(error).splitlines()[-1].strip()
            self.notes.append(f"the ranks could not be watched a second time: {why}")
            return SecondRun()

    def _run_again(self, look_at: LookAt, number: int, oracle: Oracle) -> Record:
        """A record of one step that is watched closely. Raises ScriptFailed."""
        show("the ranks train again, and are watched")
        first_step = self.options.from_step + number
        told = {"first_step": first_step, "steps": 1, "look_at": look_at, "float64": self.float64}
        try:
            return self.recording.again(**told)
        except ScriptFailed as error:
            if "address already in use" not in str(error):
                raise
        with oracle.paused():  # the one process listens at the port that the script always takes
            return self.recording.again(**told)


def show(what: str) -> None:
    """Say what is going on, to a person at a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"observing: {what}", file=sys.stderr, flush=True)  # noqa: T201


def _notes(oracle: Oracle) -> Iterator[str]:
    """What a reader must know of how the replay was done."""
    if ONE_AFTER_THE_OTHER in oracle.arrangements:
        yield "in one process the script takes the micro-batches one after the other"
    if JOINED_AND_REPEATED in oracle.arrangements:
        yield (
            "the ranks have micro-batches of different sizes: one process, which makes more of "
            "them, takes those of all ranks joined, and each as often as there are ranks"
        )
    for operation, count in oracle.missed.items():
        yield f"{operation} drew other numbers than the ranks, {count} times"
