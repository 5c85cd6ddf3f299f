"""Asks the script itself: what is the gradient of these rows, in one process?

The script runs once, and computes the gradient of other rows in each of its steps.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_equivalence.observed_scripts.arrangements import (
    AT_ONCE,
    JOINED_AND_REPEATED,
    ONE_AFTER_THE_OTHER,
    SIDE_BY_SIDE,
    Arrangement,
    arranged,
    arrangement_of,
    most_micro_batches,
)
from ddp_equivalence.observed_scripts.launch import Running
from ddp_equivalence.observed_scripts.query import Answer, Query, RowOrder
from ddp_equivalence.observed_scripts.record import Record, Row
from ddp_equivalence.observed_scripts.told import Told

MOST_TURNS = 12
"""So many steps of other optimizers are waited for, where several take turns."""

MOST_BYTES = 4 << 30
"""More than this of answers is not kept; the script is asked again."""


class CannotReplay(Exception):
    """The script does not compute in one process what it computed on the ranks. Says why."""


class Oracle:
    """``command``: trains in one process. ``at``: the folder to run it in.
    ``log``: the file for what it prints. ``record``: of the ranks. ``told``: what its
    processes are told. ``deadline``: the seconds that one answer may take. ``arrangement``: the one
    to begin with; ``arrangements``: those of all answers. ``row_order``: as in ``Query``, may be
    changed.
    """

    def __init__(
        self,
        command: Sequence[str],
        at: Path,
        log: Path,
        record: Record,
        told: Told,
        deadline: float,
        arrangement: Arrangement = SIDE_BY_SIDE,
    ) -> None:
        self.command, self._at, self._log = tuple(command), at, log
        self._record, self._told = record, told
        self._deadline = deadline
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(told.socket)
        self._listener.listen()
        self._running: Running | None = None
        self._connection: socket.socket | None = None
        self._buffer = b""
        self._closed = False
        self._answers: dict[tuple[object, ...], Answer] = {}
        self._refused: dict[tuple[object, ...], CannotReplay] = {}
        self._number = 0
        self._answered_since_start = 0
        self.arrangement = arrangement
        self.missed: dict[str, int] = {}
        self.row_order: RowOrder = "by row"
        self.arrangements: set[Arrangement] = set()

    def close(self) -> None:
        """End the script. What it has answered stays known."""
        self._closed = True
        self._stop()
        self._listener.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The script does not run inside the block, and takes no port. Then it starts again, and
        this waits until it asks for rows: who asks it something later loses no time by that.
        """
        self._stop()
        try:
            yield
        finally:
            with suppress(CannotReplay):
                line = self._line(time.monotonic())
                self._buffer = (b"" if line is None else f"{line}\n".encode()) + self._buffer

    # --- questions

    def answer(self, group: tuple[int, ...], rows: Sequence[Row], nudge: int = 0) -> Answer:
        """What the script computes from these rows alone, in their order, in each step of a group.

        ``nudge``: as in ``Query``. Raises CannotReplay.
        """
        key = (group, tuple(rows), nudge, self.row_order)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._answers:
            try:
                self._answers[key] = self._computed(group, rows, nudge)
            except CannotReplay as error:
                self._refused[key] = error  # the script is not waited for twice
                raise
            self._forget_the_oldest()
        return self._answers[key]

    def warm_up(self, group: tuple[int, ...], rows: Sequence[Row], steps: int) -> None:
        """Let the script make so many steps, of which nobody needs the answers. Raises
        CannotReplay.
        """
        for _ in range(steps):
            self._computed(group, rows, 0).delete()

    def logged(self, group: tuple[int, ...], rows: Sequence[Row], module: str) -> str:
        """The file with the operations that the script runs for these rows, from the first call
        of the module on. Raises CannotReplay.
        """
        self.answer(group, rows)  # so that it is known how the script takes them
        return self._computed(group, rows, 0, module).operations

    def _forget_the_oldest(self) -> None:
        while len(self._answers) > 2 and sum(a.bytes for a in self._answers.values()) > MOST_BYTES:
            self._answers.pop(next(iter(self._answers))).delete()

    def _computed(
        self, group: tuple[int, ...], rows: Sequence[Row], nudge: int, logged: str = ""
    ) -> Answer:
        if self._closed:
            raise CannotReplay("the script has been ended")
        for _ in range(3):
            micro_batches = arranged(self._record, self.arrangement, group, rows)
            self._number += 1
            is_epoch = self._record.accumulates_to_the_end_of_an_epoch(group)
            query = Query(
                self._number,
                group,
                micro_batches,
                0,
                nudge,
                self.row_order,
                logged=logged,
                is_epoch=is_epoch,
            )
            answer = self._ask(query)
            found = tuple(len(step.losses) for step in answer.steps)
            wanted = self._wanted(group, len(micro_batches))
            if found == wanted:
                self._require_rows(group, rows, answer)
                self.missed |= answer.missed
                self.arrangements.add(arrangement_of(self._record, self.arrangement, group))
                return answer
            if is_epoch or not self._other_arrangement(found, group):
                break
        fewer = (
            ". A rank may accumulate over fewer micro-batches at the end of an epoch than one "
            "process does: another --from-step avoids that"
        )
        raise CannotReplay(
            f"the script ran backward {_times(sum(found))} in one process, and "
            f"{_times(sum(wanted))} were expected{fewer if sum(found) > sum(wanted) else ''}"
        )

    def _require_rows(self, group: tuple[int, ...], rows: Sequence[Row], answer: Answer) -> None:
        """Raises CannotReplay if all rows were asked for, and the model was called with others."""
        if sorted(map(repr, rows)) != sorted(map(repr, self._record.rows(group))):
            return
        joined = arrangement_of(self._record, self.arrangement, group) == JOINED_AND_REPEATED
        times = self._record.world_size if joined else 1
        for number, step in zip(group, answer.steps, strict=True):
            ranks = range(self._record.world_size)
            calls = [call for r in ranks for call in self._record.step(r, number).calls]
            wanted, found = sum(call.count for call in calls), sum(step.counts)
            if wanted * times != found:
                raise CannotReplay(
                    f"the script called its model with {found} rows in one process, and with "
                    f"{wanted} on all ranks together: it does not take the rows that it is given"
                )

    def _wanted(self, group: tuple[int, ...], micro_batches: int) -> tuple[int, ...]:
        """The backward passes that each step of a group should have."""
        if len(group) == 1:
            per_step = len(self._record.step(0, group[0]).losses)
            known = max(1, most_micro_batches(self._record, group))
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
        elif self._answered_since_start > 1:  # a window at the end of an epoch is shorter
            self._stop()
            return True
        else:
            return False
        self._stop()
        return True

    # --- the process

    def _ask(self, query: Query) -> Answer:
        restarts = others = 0
        started = time.monotonic()
        while True:
            line = self._line(started)
            if line is None:
                restarts += 1
                if restarts > 2 or not (self._answered_since_start or restarts == 1):
                    raise CannotReplay(
                        "the script ended in one process before it had computed a step"
                    )
                self._stop()
                continue
            kind, _, text = line.partition(" ")
            if kind == "next":
                self._send(query)
            elif kind == "cannot":
                self._stop()
                raise CannotReplay(f"one process cannot have the rows of all ranks: {text}")
            elif kind == "answer":
                answer = Answer.from_json(json.loads(text))
                self._answered_since_start += 1
                is_answer = answer.number == query.number
                if is_answer and not answer.of_other_parameters:
                    return answer
                answer.delete()
                others += is_answer
                if others > MOST_TURNS:
                    raise CannotReplay(
                        "the optimizer that stepped on the ranks did not step in one process: "
                        f"{others} times, one stepped that has other parameters"
                    )

    def _line(self, started: float) -> str | None:
        """The next line of the script; None if it has ended."""
        if self._running is None:
            self._start()
        assert self._running is not None
        while b"\n" not in self._buffer:
            if time.monotonic() - started > self._deadline:
                end = self._running.last_words
                self._stop()
                raise CannotReplay(
                    f"the script did not compute a step in one process within "
                    f"{self._deadline:g} s; it printed last:\n{end}"
                )
            source = self._connection or self._listener
            if not select.select([source], [], [], 0.05)[0]:
                if self._connection is None and self._running.exit_code is not None:
                    self._require_answers()
                    return None
                continue
            if self._connection is None:
                self._connection = self._listener.accept()[0]
                continue
            data = self._connection.recv(1 << 20)
            if not data:
                self._require_answers()
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _require_answers(self) -> None:
        """Raises CannotReplay if the script has ended and had answered nothing."""
        if not self._answered_since_start:
            assert self._running is not None
            end = self._running.last_words_at_its_end()
            raise CannotReplay(
                f"the script ended in one process before it had computed a step; it printed last:"
                f"\n{end}"
            )

    def _send(self, query: Query) -> None:
        assert self._connection is not None
        self._connection.sendall(f"{query.to_json()}\n".encode())

    def _start(self) -> None:
        self._running = Running(self.command, self._told, self._at, self._log)
        self._answered_since_start = 0

    def _stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._running is not None:
            self._running.end()
            self._running = None
        self._buffer = b""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
