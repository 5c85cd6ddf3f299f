"""The flow of observe: record the ranks, replay in one process, judge, look closer."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.observed_scripts.ending import (
    Ending,
    ScriptFailed,
    all_done,
    failed,
    where_ranks_are,
)
from ddp_equivalence.observed_scripts.judged_step import AnalysisOfScript, judge
from ddp_equivalence.observed_scripts.launch import Running, in_one_process, processes_in
from ddp_equivalence.observed_scripts.not_comparable import about_epochs
from ddp_equivalence.observed_scripts.options import Command, ObserveOptions, Options, words_of
from ddp_equivalence.observed_scripts.oracle import (
    AT_ONCE,
    JOINED_AND_REPEATED,
    MOST_BYTES,
    ONE_AFTER_THE_OTHER,
    SIDE_BY_SIDE,
    Arrangement,
    CannotReplay,
    Oracle,
    RunningScript,
)
from ddp_equivalence.observed_scripts.queries import Instructions, LookAt
from ddp_equivalence.observed_scripts.record import Record, read_by_several_ranks, text_of_line
from ddp_equivalence.observed_scripts.report import Observed, StepFacts, export
from ddp_equivalence.observed_scripts.script_step import (
    Script,
    ScriptStep,
    SecondRun,
    is_the_same,
    seen_again,
    what_to_look_at,
)
from ddp_equivalence.report.record import tell
from ddp_equivalence.report.render import headline_text
from ddp_equivalence.report.text import Line, NotWritten, Style, labelled, plural
from ddp_equivalence.report.verdict import Verdict

SECONDS_TO_EXPLAIN = 30.0
"""Seconds that explaining a difference may take, at least."""

SECONDS_TO_END = 3.0
"""A launcher gets this long to end by itself when its ranks have ended."""

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
    float64: bool = False

    def observed(self) -> Observed:
        """Do it. Raises BadCase and ScriptFailed."""
        started = time.monotonic()
        show("the ranks train")
        record, ending = self.first_record()
        self.notes: list[str] = []
        record = self._without_ragged_dropout(record)
        recorded = time.monotonic()
        show("one process trains")
        alone = self.in_one_process(record)
        script = self._script(record, recorded - started)
        self.has_explained = self.has_looked_closer = False
        verdicts = self._judged(script, record, alone, SIDE_BY_SIDE)
        if self.options.flat is not None and all(one.outcome == "same" for one in verdicts):
            alone = words_of(self.options.flat, "flat")
            self.notes.append("without accumulation, all rows of a step as one batch")
            verdicts = self._judged(script, record, alone, AT_ONCE)
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
            facts=tuple(StepFacts.of(step) for step in observed_steps(script, record, None)),
            command=self.command,
            one_process=alone,
            world_size=record.world_size,
            seconds=(recorded - started, time.monotonic() - recorded),
            float64=self.float64,
            on_cpu=script.on_cpu,
            notes=tuple(dict.fromkeys(self.notes)),
            ending=end,
            draws_alike=self.alike,
        )

    def first_record(self) -> tuple[Record, Ending | None]:
        """The record of the ranks, and how the script ended if it did not make all steps. Notes
        whether they computed in float64. Raises ScriptFailed.
        """
        tries = {"auto": (True, False), "float64": (True,), "own": (False,)}
        found: list[tuple[Record, Ending | None, bool]] = []
        for float64 in tries[self.options.precision]:
            self.float64 = float64
            record, end = self._recorded(self.options)
            found.append((record, end, float64))
            if record.steps and (end is None or not end.code):
                break
        best, ending, self.float64 = max(found, key=lambda one: len(one[0].steps))
        if not best.steps:
            raise failed(record, end)
        return best, ending

    def _another_record(self, options: Options, look_at: LookAt | None = None) -> Record:
        """The record of another run of the ranks. Raises ScriptFailed."""
        record, why = self._recorded(options, look_at)
        if not record.steps:
            raise failed(record, why)
        return record

    def _recorded(
        self, options: Options, look_at: LookAt | None = None
    ) -> tuple[Record, Ending | None]:
        """The record, and how the script ended before it had made the steps, if it did."""
        folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=self.scratch))
        instructions = Instructions("record", str(folder), options, self.float64, look_at=look_at)
        running = Running(self.command, instructions, folder / "record.log")
        try:
            until = running.started + options.deadline
            while running.exit_code is None and not all_done(folder) and time.monotonic() < until:
                time.sleep(0.02)
            until = time.monotonic() + SECONDS_TO_END
            while running.exit_code is None and all_done(folder) and time.monotonic() < until:
                time.sleep(0.01)
            code = running.exit_code
            hangs = code is None and not all_done(folder)
            places = where_ranks_are(Record(folder)) if hangs else {}
        finally:
            running.end()
        record = Record(folder)
        made = record.steps_by_rank
        if len(record.steps) >= options.steps or all_done(folder):
            return record, None
        words = running.last_words
        return record, Ending(code, options.deadline, options.steps, made, words, places)

    def _without_ragged_dropout(self, record: Record) -> Record:
        """Another record, without dropout, if one process could not drop what the ranks did."""
        if not self.options.dropout or not record.ragged_and_drawn():
            return record
        self.notes.append(RAGGED)
        self.options = replace(self.options, dropout=False)
        return self._another_record(self.options)

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
            name=os.path.basename(main or self.command[0]),
            backend=record.runs[0]["backend"] or "gloo",
            float64=self.float64,
            on_cpu=bool(self.options.as_cpu),
            steps=len(record.steps),
            seconds=max(SECONDS_TO_EXPLAIN, round(seconds)),
            plant=self.options.plant,
            repeat=f"ddp-equivalence observe {self.options.words()}-- {shlex.join(self.command)}",
        )

    def _judged(
        self, script: Script, record: Record, alone: Sequence[str], arrangement: Arrangement
    ) -> list[Verdict]:
        """A verdict on every step."""
        folder = self.scratch / arrangement.replace(" ", "_")
        folder.mkdir()
        # A launcher says how many processes train; other scripts count devices.
        count_devices = tuple(alone) == self.command
        devices = min(1, self.options.as_cpu) if count_devices else self.options.as_cpu
        options = replace(self.options, as_cpu=devices)
        instructions = Instructions("replay", str(record.folder), options, self.float64)
        running = RunningScript(alone, folder / "one_process.log", instructions)
        oracle = Oracle(running, record, arrangement)
        try:
            steps = observed_steps(script, record, oracle)
            compute_in_their_order(steps, self.options.from_step)
            return list(map(self._verdict, steps))
        finally:
            running.close()
            self.notes += _notes(oracle)
            self.alike = tuple(oracle.alike)

    def _verdict(self, step: ScriptStep) -> Verdict:
        verdict = judge(step, None if self.has_explained else self._look_closer)
        if not self.has_explained:
            verdict.full_report()  # asks the script everything, while it runs
        if verdict.outcome == "different" and not self.has_explained:
            self.has_explained = True
            self._export(step, verdict)
        return verdict

    def _export(self, step: ScriptStep, verdict: Verdict) -> None:
        """Write the step to files, if the user wants that."""
        if self.options.export is None or step.oracle is None:
            return
        folder, alone = Path(self.options.export), shlex.join(step.oracle.script.command)
        try:
            script = export(step, folder, headline_text(verdict), shlex.join(self.command), alone)
            note = f"the step is in {folder}; python {script} compares what it holds"
        except NotWritten as error:
            shutil.rmtree(folder)
            note = f"the step is not in {folder}: {error.filename}: {error.strerror}"
        self.notes.append(note)

    def _look_closer(self, step: ScriptStep, analysis: AnalysisOfScript) -> SecondRun:
        """Let the ranks run again, and watch them; once, as the same lines make all steps."""
        looked, self.has_looked_closer = self.has_looked_closer, True
        look_at = what_to_look_at(step, analysis.kind, analysis.sample_of_step(0))
        if look_at is None or looked:
            return SecondRun()
        try:
            try:
                record = self._run_again(step, look_at)
            except ScriptFailed:  # it may not if less is watched
                record = self._run_again(step, replace(look_at, operations=False, set_up=False))
        except ScriptFailed as error:
            why = str(error).splitlines()[-1].strip()
            self.notes.append(f"the ranks could not be watched a second time: {why}")
            return SecondRun()
        if not is_the_same(step, record):
            self.notes.append(NOT_REPEATED)
            return SecondRun()
        return seen_again(step, record, look_at.module)

    def _run_again(self, step: ScriptStep, look_at: LookAt) -> Record:
        """A record of one step that is watched closely. Raises ScriptFailed."""
        show("the ranks train again, and are watched")
        assert step.oracle is not None
        options = replace(self.options, from_step=self.options.from_step + step.number, steps=1)
        again = partial(self._another_record, options, look_at)
        try:
            return again()
        except ScriptFailed as error:
            if "address already in use" not in str(error):
                raise
        step.oracle.script.stop()  # the one process listens at the port that the script takes
        return again()


def show(what: str) -> None:
    """Say what is going on, to a person at a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"observing: {what}", file=sys.stderr, flush=True)  # noqa: T201


def _notes(oracle: Oracle) -> Iterator[str]:
    """Says what a reader must know of how the replay was done."""
    if ONE_AFTER_THE_OTHER in oracle.arrangements:
        yield "in one process the script takes the micro-batches one after the other"
    if JOINED_AND_REPEATED in oracle.arrangements:
        yield (
            "the ranks have micro-batches of different sizes: one process, which makes more of "
            "them, takes those of all ranks joined, and each as often as there are ranks"
        )
    for operation, count in oracle.missed.items():
        yield f"{operation} drew other numbers than the ranks, {count} times"


DEVICES_OF_UNKNOWN = 2
"""A command that does not say how many processes it starts gets so many devices."""


def observe(command: Command, **options: Unpack[ObserveOptions]) -> Observed:
    """Run the command on its ranks and in one process, and compare what its optimizer gets.

    ``command``: starts training on several ranks of this machine, as words or as a line for a
    shell. ``options``: see ``ddp_equivalence.observed_scripts.options.Options``.

    Raises BadCase for an argument that cannot be right, and ScriptFailed if the command ends before
    it has made the steps to record.
    """
    with _observation(command, options) as observation:
        found = observation.observed()
    for verdict in found.all_verdicts:
        tell(verdict, None)
    return found


def plan(command: Command, **options: Unpack[ObserveOptions]) -> tuple[Line, ...]:
    """Run the command on its ranks only, and say what one process would be given.

    The arguments and errors are those of ``observe``.
    """
    with _observation(command, options) as observation:
        record, _ = observation.first_record()
        alone = observation.in_one_process(record)
        name = os.path.basename(record.runs[0]["main"] or observation.command[0])
        return tuple(plan_lines(record, name, alone, observation.float64))


@contextmanager
def _observation(command: Command, given: ObserveOptions) -> Iterator[ScriptObservation]:
    """Does everything in a folder that is deleted in the end unless the user keeps it."""
    options, words = Options(**given), words_of(command, "command")
    if options.as_cpu < 0:
        options = replace(options, as_cpu=processes_in(words) or DEVICES_OF_UNKNOWN)
    if options.keep is not None:
        kept = Path(options.keep)
        kept.mkdir(parents=True)
        try:
            yield ScriptObservation(words, replace(options, keep=None), kept.resolve())
        except OSError:  # such as a full disk: what is there is of no use
            shutil.rmtree(kept)
            raise
        return
    with tempfile.TemporaryDirectory(prefix="observed-", ignore_cleanup_errors=True) as folder:
        yield ScriptObservation(words, options, Path(folder).resolve())


# What a record shows of a script, before it is replayed: what one process will be given.

MOST_LEAVES = 6


def plan_lines(
    record: Record, name: str, one_process: Sequence[str], float64: bool
) -> Iterator[Line]:
    """The plan, line by line."""
    count, ranks = len(record.steps), record.world_size
    precision = "float64" if float64 else "the script's own precision"
    headline = f"plan: {name}: {count} {plural(count, 'step')} of {ranks} ranks were recorded"
    yield Line(f"{headline}, in {precision}", Style.LABEL)
    for group in record.groups:
        for number in group:
            yield Line("")
            yield from _step_lines(record, number, reads=number == group[0])
    yield Line("")
    yield from labelled("One process: ", shlex.join(one_process))


def _step_lines(record: Record, number: int, reads: bool) -> Iterator[Line]:
    step = record.step(0, number)
    at = f" at {text_of_line(step.stepped_at)}" if step.stepped_at else ""
    yield Line(f"  step {number + 1}: {' + '.join(step.optimizers)} steps{at}")
    called = Counter((call.module, text_of_line(call.place)) for call in step.calls)
    for (module, place), times in called.items():
        where = f" at {place}" if place else ""
        yield Line(f"    {module} is called{where}, {times} {plural(times, 'time')} by rank 0")
    passes = len(step.losses)
    yield Line(f"    backward runs {passes} {plural(passes, 'time')} on rank 0")
    more = f"; {step.unnamed} more are in no module that is called" if step.unnamed else ""
    yield Line(f"    {len(step.stepped)} gradients are compared{more}")
    if reads:
        what = "its loader yields" if record.feed == "loader" else "its model is called with"
        yield Line(f"    {what} the rows of all ranks as one batch; on rank 0 these are:")
        read = step.read_rows[0].all_tensors()
        shapes = [f"{path or 'a tensor'}: {tuple(one.shape)}" for path, one in read]
        more_leaves = [f"and {len(shapes) - MOST_LEAVES} more"] if shapes[MOST_LEAVES:] else []
        yield from (Line(f"      {text}") for text in (*shapes[:MOST_LEAVES], *more_leaves))
    if step.draws:
        yield Line("    random numbers are drawn as each rank drew them")


# The steps of a record, and what the one process is asked of them first.

BYTES_OF_ELEMENT = 24
"""An answer has up to three gradients, in float64."""


MOST_EARLIER = 200
"""One process makes as many steps as the ranks made before those that are recorded; not more than
this.
"""


def observed_steps(script: Script, record: Record, oracle: Oracle | None) -> list[ScriptStep]:
    """All of them. ``oracle``: None if the one process is asked nothing."""
    steps: list[ScriptStep] = []
    for group in record.groups:
        rows, before = record.rows(group), steps[-1] if steps else None
        steps += [ScriptStep(script, record, oracle, n, group, rows, before) for n in group]
    return steps


def compute_in_their_order(steps: Sequence[ScriptStep], earlier: int) -> None:
    """Let the one process compute all steps, as it does by itself, before it is asked anything else
    of them: the script may count its steps, and anneal its loss by that count. ``earlier``: so many
    steps came before the first one.
    """
    if sum(step.elements for step in steps) * BYTES_OF_ELEMENT > MOST_BYTES:
        return
    with suppress(CannotReplay):  # it is asked again, and the verdict then says why
        if steps and steps[0].oracle is not None and earlier <= MOST_EARLIER:
            steps[0].oracle.warm_up(steps[0].group, steps[0].rows, earlier)
            steps[0].oracle.keeps = True
        for step in steps:
            step.answer(step.everything)
