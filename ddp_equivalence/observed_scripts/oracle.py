"""Asks the script itself: what is the gradient of these rows, in one process?"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.observed_scripts.launch import Running, short_folder
from ddp_equivalence.observed_scripts.queries import (
    OF_RECORD,
    Answer,
    Instructions,
    Query,
    RowOrder,
    State,
    path_of_kept,
)
from ddp_equivalence.observed_scripts.record import Record, Row, pieces_of

# The script while it runs in one process, and the socket over which it is asked questions.

SECONDS_OF_KEPT = 60.0
"""A process that was kept is not asked again if it takes longer to answer."""

CANNOT_HAVE = "one process cannot have the rows of all ranks"

MOST_TIMES = 64
"""A query is given again so often, if the script does not step with it."""

LEFT_OUT = "the script read them, and did not step with them"

NO_STEP = "the script ended in one process before it had computed a step"

TOO_SLOW = "the script did not compute a step in one process within"


Message = tuple[str, Any]
"""A process of the script asks for the "next" query, sends an "answer", or "cannot" compute a query
and says why.
"""


class CannotReplay(Exception):
    """The script does not compute in one process what it computed on the ranks. Says why."""


class RunningScript:
    """``command``: trains in one process. ``log``: the file for what it prints. ``instructions``:
    those to its processes. ``answered``: how many queries it has answered since it was started.
    ``first``: the one that it was asked first, since then.
    """

    def __init__(self, command: Sequence[str], log: Path, instructions: Instructions) -> None:
        self.command, self._log = tuple(command), log
        self._folder = Path(tempfile.mkdtemp(prefix="obs", dir=short_folder()))
        self._instructions = replace(instructions, socket=str(self._folder / "socket"))
        self._deadline = instructions.options.deadline  # of one answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._instructions.socket)
        self._listener.listen()
        self._running: Running | None = None
        self._connections: list[Connection] = []
        self._asks: Connection | None = None
        self.first: Query | None = None
        self.answered, self.closed = 0, False

    def close(self) -> None:
        """End it for good."""
        self.closed = True
        self.stop()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End it. The next question starts it again."""
        for connection in self._connections:
            connection.close()
        self._connections, self._asks = [], None
        if self._running is not None:
            self._running.end()
            self._running = None
        for path in self._folder.glob("kept*"):
            path.unlink()

    def send(self, query: Query) -> None:
        """Ask it, when it has asked for a query."""
        assert self._asks is not None
        self.first = self.first or query
        self._asks.send(query)

    def answer_of_kept(self, query: Query) -> Answer | None:
        """The answer of the process that was kept at the beginning of the query's steps; None if
        there is none, or it does not answer. Raises CannotReplay if it cannot have the rows.
        """
        path = path_of_kept(self._folder, query.steps)
        try:
            with Client(str(path), "AF_UNIX") as asked:
                asked.send(query)
                while asked.poll(min(self._deadline, SECONDS_OF_KEPT)):
                    kind, found = asked.recv()
                    if kind == "cannot":
                        raise CannotReplay(f"{CANNOT_HAVE}: {found}")
                    if kind == "answer" and found.number == query.number:
                        return found  # type: ignore[no-any-return]
        except (OSError, EOFError):
            pass
        path.unlink(missing_ok=True)
        return None

    def message(self, started: float) -> Message | None:
        """Its next message, for which one has waited since ``started``; None if it has ended.
        Several of its processes may ask, such as one that starts the others and wants to know how
        long a loader is: ``send`` answers the one whose message was the last.

        Raises CannotReplay if it takes too long, or has ended without an answer.
        """
        if self._running is None:
            self._running = Running(self.command, self._instructions, self._log)
            self.first, self.answered = None, 0
        while time.monotonic() - started <= self._deadline:
            is_over = self._running.exit_code is not None  # asked first: it may have sent something
            for source in wait([self._listener, *self._connections], timeout=0.05):
                if not isinstance(source, Connection):
                    self._connections.append(Connection(self._listener.accept()[0].detach()))
                    continue
                try:
                    message: Message = source.recv()
                except (EOFError, ConnectionError):  # the process has ended, or was killed
                    self._connections.remove(source)
                    source.close()
                    continue
                self._asks = source
                return message
            # A process that has answered and left does not come back.
            if not self._connections and (self.answered or is_over):
                self._require_answers()
                return None
        words = self._running.last_words
        self.stop()
        raise CannotReplay(f"{TOO_SLOW} {self._deadline:g} s; it printed last:\n{words}")

    def _require_answers(self) -> None:
        if self.answered:
            return
        assert self._running is not None
        end = self._running.last_words_at_its_end()
        given = ""
        by_calls = Record(Path(self._instructions.folder)).feed == "calls"
        if by_calls and self.first is not None:
            given = (
                ", after its model had been given the rows of all ranks: what the script combines "
                "with them may be of its own rows, since it has no DataLoader"
            )
        raise CannotReplay(f"{NO_STEP}{given}; it printed last:\n{end}")


# How one process takes the micro-batches that several ranks have read.

SIDE_BY_SIDE, ONE_AFTER_THE_OTHER, AT_ONCE = "side by side", "one after the other", "at once"
JOINED_AND_REPEATED = "joined and repeated"

Arrangement = str
"""How one process takes the micro-batches of several ranks: each joined with those of the other
ranks; one after the other, if the script divides its micro-batches among the ranks; or all at once,
without accumulation.

If the ranks' micro-batches have different numbers of rows, a script that divides them among the
ranks gets them joined, each several times: one after the other they would count equally, as they do
on the ranks, where one process has equal ones.
"""


# The script runs once, and computes the gradient of other rows in each of its steps.

MOST_TURNS = 12
"""So many steps of other optimizers are waited for, where several take turns."""

REPEATED = 1e-9
"""Losses that are computed twice in float64 differ by less."""

MOST_BYTES = 4 << 30
"""More than this of answers is not kept; the script is asked again."""


class Oracle:
    """``script``: runs in one process. ``record``: of the ranks. ``arrangement``: the one to begin
    with; ``arrangements``: those of all answers. ``row_order``: as in ``Query``, may be changed.
    ``keeps``: from now on, a process is kept at the beginning of each step.
    """

    def __init__(self, script: RunningScript, record: Record, arrangement: Arrangement) -> None:
        self.script, self._record, self.arrangement = script, record, arrangement
        self._ranks = range(record.world_size)
        self._answers: dict[tuple[object, ...], Answer] = {}
        self._refused: dict[tuple[object, ...], CannotReplay] = {}
        self._number = 0
        self.missed: dict[str, int] = {}
        self.alike: dict[str, None] = {}
        self.row_order: RowOrder = "by row"
        self.arrangements: set[Arrangement] = set()
        self.keeps = False

    # --- questions

    def answer(
        self, group: tuple[int, ...], rows: Sequence[Row], nudge: int = 0, state: State = OF_RECORD
    ) -> Answer:
        """Let the script compute these rows alone, in their order, in each step of a group.

        ``nudge``, ``state``: as in ``Query``. Raises CannotReplay.
        """
        key = (group, tuple(rows), nudge, self.row_order, state)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._answers:
            try:
                self._answers[key] = self._computed(group, rows, nudge=nudge, state=state)
            except CannotReplay as error:
                self._refused[key] = error  # the script is not waited for twice
                raise
            answers = self._answers
            while len(answers) > 2 and sum(one.bytes for one in answers.values()) > MOST_BYTES:
                answers.pop(next(iter(answers))).delete()  # the oldest
        answer = self._answers[key]
        if self._is_everything(group, rows):  # a part may lack what is drawn for all of them
            self.missed |= answer.missed
            self.alike |= dict.fromkeys(answer.alike)
        return answer

    def warm_up(self, group: tuple[int, ...], rows: Sequence[Row], steps: int) -> None:
        """Let the script make so many steps, of which nobody needs the answers. Raises
        CannotReplay.
        """
        for _ in range(steps):
            self._computed(group, rows).delete()

    def repeats(self, group: tuple[int, ...], rows: Sequence[Row]) -> bool:
        """True if the script computes the same losses when it is asked twice. Raises CannotReplay.

        It does not if something decides that is restored for no question, such as a counter.
        """
        # What was kept would hold the same again.
        first, second = (self._computed(group, rows, kept=False) for _ in range(2))
        losses = [[loss for step in one.steps for loss in step.losses] for one in (first, second)]
        first.delete()
        second.delete()
        return all(isclose(*pair, rel_tol=REPEATED) for pair in zip(*losses, strict=True))

    def logged(self, group: tuple[int, ...], rows: Sequence[Row], module: str) -> Operations | None:
        """The operations that the script runs for these rows, from the first call of the module on;
        None if they could not be logged. Raises CannotReplay.
        """
        self.answer(group, rows)  # so that it is known how the script takes them
        return self._computed(group, rows, logged=module).operations

    def _computed(
        self, group: tuple[int, ...], rows: Sequence[Row], kept: bool = True, **asked: Any
    ) -> Answer:
        """``kept``: a process that was kept may compute it. ``asked``: fields of the query."""
        if self.script.closed:
            raise CannotReplay("the script has been ended")
        is_epoch = self._record.is_cut_short(group)
        for _ in range(3):
            counts = [self._record.counts(rank, group) for rank in self._ranks]
            micro_batches = [pieces_of(one, counts) for one in self._arranged(group, rows)]
            self._number += 1
            if self.script.first is not None and self.script.first.is_epoch and not is_epoch:
                self.script.stop()  # it may have taken the length of that epoch for good
            query = Query(
                self._number,
                group,
                tuple(micro_batches),
                row_order=self.row_order,
                is_epoch=is_epoch,
                keep=self.keeps and kept,
                **asked,
            )
            answer = (self.script.answer_of_kept(query) if kept else None) or self._ask(query)
            found = tuple(len(step.losses) for step in answer.steps)
            expected = self._expected_passes(group, len(micro_batches))
            if found == expected:
                self._require_rows(group, rows, answer)
                self.arrangements.add(self._arrangement_of(group))
                return answer
            if is_epoch or not self._other_arrangement(found, group):
                break
        fewer = (
            ". A rank may accumulate over fewer micro-batches at the end of an epoch than one "
            "process does: another --from-step avoids that"
        )
        raise CannotReplay(
            f"the script ran backward {_times(sum(found))} in one process, and "
            f"{_times(sum(expected))} were expected{fewer if sum(found) > sum(expected) else ''}"
        )

    def _arranged(self, group: tuple[int, ...], rows: Sequence[Row]) -> list[list[Row]]:
        """The micro-batches in which the script is given these rows of a group of steps."""
        arrangement = self._arrangement_of(group)
        each = max(len(self._record.counts(rank, group)) for rank in self._ranks)
        units: dict[tuple[int, ...], list[Row]] = defaultdict(list)
        for row in rows:
            one_by_one = row.micro_batch, row.rank
            unit = {ONE_AFTER_THE_OTHER: one_by_one, AT_ONCE: ()}.get(arrangement, one_by_one[:1])
            units[unit].append(row)
        expected = {SIDE_BY_SIDE: each, AT_ONCE: 1}.get(arrangement, each * len(self._ranks))
        taken = [of_unit for _, of_unit in sorted(units.items())]
        if expected % len(taken):
            taken = [list(rows)]
        return taken * (expected // len(taken))

    def _arrangement_of(self, group: tuple[int, ...]) -> Arrangement:
        if self.arrangement != ONE_AFTER_THE_OTHER:
            return self.arrangement
        counts = {count for rank in self._ranks for count in self._record.counts(rank, group)}
        return ONE_AFTER_THE_OTHER if len(counts) == 1 else JOINED_AND_REPEATED

    def order_of(self, group: tuple[int, ...], rows: Sequence[Row]) -> list[int]:
        """The numbers of these rows in the order in which the script is given them."""
        numbers = {row: number for number, row in enumerate(rows)}
        return [numbers[row] for unit in self._arranged(group, rows) for row in unit]

    def _is_everything(self, group: tuple[int, ...], rows: Sequence[Row]) -> bool:
        return sorted(map(repr, rows)) == sorted(map(repr, self._record.rows(group)))

    def _require_rows(self, group: tuple[int, ...], rows: Sequence[Row], answer: Answer) -> None:
        """Raises CannotReplay if all rows were asked for, and the model was called with others."""
        if not self._is_everything(group, rows):
            return
        joined = self._arrangement_of(group) == JOINED_AND_REPEATED
        times = len(self._ranks) if joined else 1
        for number, step in zip(group, answer.steps, strict=True):
            expected = sum(self._record.step(r, number).rows_of_calls for r in self._ranks)
            found = step.rows_of_calls
            if expected * times != found:
                raise CannotReplay(
                    f"the script called its model with {found} rows in one process, and with "
                    f"{expected} on all ranks together: it does not take the rows that it is given"
                )

    def _expected_passes(self, group: tuple[int, ...], micro_batches: int) -> tuple[int, ...]:
        """The backward passes that each step of a group should have."""
        if len(group) == 1:
            per_step = len(self._record.step(0, group[0]).losses)
            known = max(len(self._record.counts(rank, group)) for rank in self._ranks)
            return (micro_batches * max(1, per_step // known),)
        return tuple(len(self._record.step(0, number).losses) for number in group)

    def _other_arrangement(self, found: tuple[int, ...], group: tuple[int, ...]) -> bool:
        """Change the arrangement to what the script does; False if no other one is known."""
        ours = len(self._record.step(0, group[0]).losses)
        if self.arrangement != SIDE_BY_SIDE:
            return False
        if found[0] == ours * self._record.world_size and ours != found[0]:
            self.arrangement = ONE_AFTER_THE_OTHER
        elif found[0] == 1 and ours > 1:
            self.arrangement = AT_ONCE
        elif self.script.answered > 1:  # a window at the end of an epoch is shorter
            self.script.stop()
            return True
        else:
            return False
        self.script.stop()
        return True

    def _is_of_other_parameters(self, query: Query, answer: Answer) -> bool:
        """The optimizer that stepped has none of the parameters of the one that stepped in the
        record, such as where two optimizers take turns.
        """
        recorded = (self._record.step(query.ranks[0], number) for number in query.steps)
        return any(
            one.held and step.held and one.held.keys().isdisjoint(step.held)
            for one, step in zip(recorded, answer.steps, strict=True)
        )

    # --- the process

    def _ask(self, query: Query) -> Answer:
        restarts = others = given = 0
        started = time.monotonic()
        while True:
            message = self.script.message(started)
            if message is None:
                restarts += 1
                if restarts > 2 or not (self.script.answered or restarts == 1):
                    raise CannotReplay(NO_STEP)
                self.script.stop()
                continue
            kind, answer = message
            if kind == "next":
                self.script.send(query)
                given += 1
                if given > MOST_TIMES:
                    self.script.stop()
                    raise CannotReplay(f"one process does not compute these rows: {LEFT_OUT}")
            elif kind == "cannot":
                self.script.stop()
                raise CannotReplay(f"{CANNOT_HAVE}: {answer}")
            else:
                self.script.answered += 1
                is_answer = answer.number == query.number
                if is_answer and not self._is_of_other_parameters(query, answer):
                    return answer  # type: ignore[no-any-return]
                answer.delete()
                others += is_answer
                if others > MOST_TURNS:
                    raise CannotReplay(
                        "the optimizer that stepped on the ranks did not step in one process: "
                        f"{others} times, one stepped that has other parameters"
                    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
