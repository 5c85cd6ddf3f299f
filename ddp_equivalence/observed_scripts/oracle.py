"""Asks the script itself: what is the gradient of these rows, in one process?

The script runs once, and computes the gradient of other rows in each of its steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import isclose
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
from ddp_equivalence.observed_scripts.query import Answer, Query, RowOrder, State
from ddp_equivalence.observed_scripts.question_line import LEFT_OUT, MOST_TIMES
from ddp_equivalence.observed_scripts.record import Record, Row
from ddp_equivalence.observed_scripts.running_script import (
    CANNOT_HAVE,
    CannotReplay,
    RunningScript,
)
from ddp_equivalence.observed_scripts.told import Told

MOST_TURNS = 12
"""So many steps of other optimizers are waited for, where several take turns."""

REPEATED = 1e-9
"""Losses that are computed twice in float64 differ by less."""

MOST_BYTES = 4 << 30
"""More than this of answers is not kept; the script is asked again."""


class Oracle:
    """``command``: trains in one process. ``at``: the folder to run it in.
    ``log``: the file for what it prints. ``record``: of the ranks. ``told``: what its
    processes are told. ``deadline``: the seconds that one answer may take. ``arrangement``: the one
    to begin with; ``arrangements``: those of all answers. ``row_order``: as in ``Query``, may be
    changed. ``keeps``: from now on, a process is kept at the beginning of each step.
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
        self.command, self._record = tuple(command), record
        self._script = RunningScript(command, at, log, told, deadline)
        self._closed = False
        self._answers: dict[tuple[object, ...], Answer] = {}
        self._refused: dict[tuple[object, ...], CannotReplay] = {}
        self._number = 0
        self.arrangement = arrangement
        self.missed: dict[str, int] = {}
        self.alike: dict[str, None] = {}
        self.row_order: RowOrder = "in dim 1" if record.time_first else "by row"
        self.arrangements: set[Arrangement] = set()
        self.keeps = False

    def close(self) -> None:
        """End the script. What it has answered stays known."""
        self._closed = True
        self._script.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The script does not run inside the block, and takes no port. Then it starts again, and
        this waits until it asks for rows: who asks it something later loses no time by that.
        """
        self._script.stop()
        try:
            yield
        finally:
            with suppress(CannotReplay):
                self._script.wait_until_it_asks()

    # --- questions

    def answer(
        self,
        group: tuple[int, ...],
        rows: Sequence[Row],
        nudge: int = 0,
        state: State = State(),  # noqa: B008  (it is frozen)
    ) -> Answer:
        """What the script computes from these rows alone, in their order, in each step of a group.

        ``nudge``, ``state``: as in ``Query``. Raises CannotReplay.
        """
        key = (group, tuple(rows), nudge, self.row_order, state)
        if key in self._refused:
            raise self._refused[key]
        if key not in self._answers:
            try:
                self._answers[key] = self._computed(group, rows, nudge, state=state)
            except CannotReplay as error:
                self._refused[key] = error  # the script is not waited for twice
                raise
            self._forget_the_oldest()
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
            self._computed(group, rows, 0).delete()

    def repeats(self, group: tuple[int, ...], rows: Sequence[Row]) -> bool:
        """True if the script computes the same losses when it is asked twice. Raises CannotReplay.

        It does not if something decides that is restored for no question, such as a counter.
        """
        goes_on = State(reports_buffers=True)  # what was kept would hold the same again
        first, second = (self._computed(group, rows, 0, state=goes_on) for _ in range(2))
        losses = [[loss for step in one.steps for loss in step.losses] for one in (first, second)]
        first.delete()
        second.delete()
        return all(isclose(*pair, rel_tol=REPEATED) for pair in zip(*losses, strict=True))

    def buffers_carried_over(
        self,
        before: tuple[int, ...],
        rows: Sequence[Row],
        now: tuple[int, ...],
        read: Sequence[Row],
    ) -> Answer:
        """The answer for the rows that are ``read`` now, with the buffers that one process made of
        its own in the steps before, from ``rows``. Raises CannotReplay.
        """
        self._computed(before, rows, 0, state=State(next_step=now[0])).delete()
        return self._computed(now, read, 0, state=State(reports_buffers=True))

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
        self,
        group: tuple[int, ...],
        rows: Sequence[Row],
        nudge: int,
        logged: str = "",
        state: State = State(),  # noqa: B008
    ) -> Answer:
        if self._closed:
            raise CannotReplay("the script has been ended")
        is_epoch = self._record.is_cut_short(group)
        for _ in range(3):
            micro_batches = arranged(self._record, self.arrangement, group, rows)
            self._number += 1
            if self._script.first is not None and self._script.first.is_epoch and not is_epoch:
                self._script.stop()  # it may have taken the length of that epoch for good
            query = Query(
                self._number,
                group,
                micro_batches,
                0,
                nudge,
                self.row_order,
                logged=logged,
                is_epoch=is_epoch,
                state=state,
                keep=self.keeps and not state.is_carried_over,
            )
            answer = self._script.answer_of_kept(query) or self._ask(query)
            found = tuple(len(step.losses) for step in answer.steps)
            left_out = self._record.left_out(group)
            used = sum(pieces[0].micro_batch not in left_out for pieces in micro_batches)
            wanted = self._wanted(group, used, len(left_out))
            if found == wanted:
                self._require_rows(group, rows, answer)
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

    def _is_everything(self, group: tuple[int, ...], rows: Sequence[Row]) -> bool:
        return sorted(map(repr, rows)) == sorted(map(repr, self._record.rows(group)))

    def _require_rows(self, group: tuple[int, ...], rows: Sequence[Row], answer: Answer) -> None:
        """Raises CannotReplay if all rows were asked for, and the model was called with others."""
        if not self._is_everything(group, rows):
            return
        joined = arrangement_of(self._record, self.arrangement, group) == JOINED_AND_REPEATED
        times = self._record.world_size if joined else 1
        for number, step in zip(group, answer.steps, strict=True):
            ranks = range(self._record.world_size)
            wanted = sum(sum(self._record.reader(r, number).call_counts) for r in ranks)
            found = sum(step.counts)
            if wanted * times != found:
                raise CannotReplay(
                    f"the script called its model with {found} rows in one process, and with "
                    f"{wanted} on all ranks together: it does not take the rows that it is given"
                )

    def _wanted(self, group: tuple[int, ...], micro_batches: int, left_out: int) -> tuple[int, ...]:
        """The backward passes that each step of a group should have. ``left_out``: so many
        micro-batches of a rank have none.
        """
        if len(group) == 1:
            per_step = len(self._record.step(0, group[0]).losses)
            known = max(1, most_micro_batches(self._record, group) - left_out)
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
        elif self._script.answered > 1:  # a window at the end of an epoch is shorter
            self._script.stop()
            return True
        else:
            return False
        self._script.stop()
        return True

    # --- the process

    def _ask(self, query: Query) -> Answer:
        restarts = others = given = 0
        started = time.monotonic()
        while True:
            line = self._script.line(started)
            if line is None:
                restarts += 1
                if restarts > 2 or not (self._script.answered or restarts == 1):
                    raise CannotReplay(
                        "the script ended in one process before it had computed a step"
                    )
                self._script.stop()
                continue
            kind, _, text = line.partition(" ")
            if kind == "next":
                self._script.send(query)
                given += 1
                if given > MOST_TIMES:
                    self._script.stop()
                    raise CannotReplay(f"one process does not compute these rows: {LEFT_OUT}")
            elif kind == "cannot":
                self._script.stop()
                raise CannotReplay(f"{CANNOT_HAVE}: {text}")
            elif kind == "answer":
                answer = Answer.from_json(json.loads(text))
                self._script.answered += 1
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


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
