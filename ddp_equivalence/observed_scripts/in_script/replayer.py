"""Lets the script compute, in one process, the gradient of whatever rows it is asked for.

Before the script calls a module for the first time in a step, the module gets the weights and
buffers that were recorded. Where the script reads a batch, it is given the rows of a ``Query``.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_equivalence.comparison.low_precision import NudgedInside
from ddp_equivalence.observed_scripts.falling_order import in_falling_order
from ddp_equivalence.observed_scripts.in_script.asked_queries import AskedQueries
from ddp_equivalence.observed_scripts.in_script.fed_loaders import FedLoaders
from ddp_equivalence.observed_scripts.in_script.kept_steps import keep
from ddp_equivalence.observed_scripts.in_script.kept_tensors import put, whole
from ddp_equivalence.observed_scripts.in_script.logged_operations import LoggedOperations
from ddp_equivalence.observed_scripts.in_script.names import named_tensors
from ddp_equivalence.observed_scripts.in_script.rank_generators import RankGenerators, Source
from ddp_equivalence.observed_scripts.in_script.restored_generators import (
    follow_restored_states,
)
from ddp_equivalence.observed_scripts.in_script.step_in_progress import StepInProgress
from ddp_equivalence.observed_scripts.in_script.watch import Watch
from ddp_equivalence.observed_scripts.listed_rows import TOP, TOP_OF_CALL
from ddp_equivalence.observed_scripts.query import Answer, AnswerOfStep, Piece, Query
from ddp_equivalence.observed_scripts.question_line import QuestionLine
from ddp_equivalence.observed_scripts.recorded_step import (
    Event,
    StepReader,
    in_float64,
    rank_folder,
)
from ddp_equivalence.observed_scripts.rows import Part, joined, put_into
from ddp_equivalence.observed_scripts.told import Told


class Replayer(Watch):
    """``told``: where the record is, and where to ask what to compute."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self._told, self.float64, self.time_first = told, told.float64, told.time_first
        self._line = QuestionLine(told.socket)
        self._asked = AskedQueries(self._line)
        self._fed_loaders = FedLoaders(told, self.loaders, self._asked)
        self._answers: list[AnswerOfStep] = []
        self._complete, self._generators = False, RankGenerators()
        follow_restored_states(self._generators)
        self._not_given: dict[int, deque[tuple[Query, list[Source]]]] = {}
        self._nudged_inside: NudgedInside | None = None
        self._operations: LoggedOperations | None = None
        self._logged = ""
        self._after_step: tuple[StepReader, set[str]] | None = None
        register_optimizer_step_post_hook(self._step_as_the_ranks)

    @property
    def _now(self) -> tuple[Query, int]:
        """The query that is being computed, and the recorded step in it."""
        query = self._asked.now
        return query, query.steps[min(len(self._answers), len(query.steps) - 1)]

    @property
    def counts_grads(self) -> bool:
        """As on the ranks."""
        query, number = self._now
        return self._reader(query.ranks[0], number).step.by_grad

    def ends_step(self) -> None:
        """Answer, when all optimizers have stepped that stepped in the record."""
        if self._fed_loaders.was_of_other_phase():
            self.now = StepInProgress()
            return
        query, number = self._now
        record = self._reader(query.ranks[0], number)
        if len(self.now.optimizers) < len(record.step.optimizers):
            return
        lowest = ""
        if self._nudged_inside is not None:
            self._nudged_inside.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            lowest = str(self._nudged_inside.lowest or "").removeprefix("torch.")
            self._nudged_inside = None
        self._end_log()
        # The script may be started several times, and be asked the same more than once.
        name = f"{query.number}-{os.getpid()}-{self._line.answered}-{number}.safetensors"
        parameters = {*record.gradient_names("held/"), *record.step.without_gradient}
        at = self._line.folder / name
        if query.state.next_step is not None:
            self._after_step = self._reader(query.weights_of, query.state.next_step), parameters
        self._answers.append(AnswerOfStep.of(self.now, number, at, parameters, lowest))
        self._complete = True
        if len(self._answers) == len(query.steps):
            steps, drawn = tuple(self._answers), self._generators
            answer = Answer(query.number, steps, drawn.missed, self._logged, tuple(drawn.alike))
            drawn.missed, drawn.alike = {}, {}
            self._line.answer(answer)
            self._answers, self._logged = [], ""

    def goes_on(self) -> None:
        """Begin the next step."""
        if self._complete:
            self._complete = False
            self.now = StepInProgress()
            self._generators.forget()
            if self._answers:  # a further step of the same query
                self.draws_like_the_record(Event("start"))

    @lru_cache(maxsize=64)  # noqa: B019  (there is one Replayer in a process, and it stays)
    def _reader(self, rank: int, number: int) -> StepReader:
        folder = rank_folder(self._told.folder, rank)
        return StepReader(folder, number, self._told.time_first)

    # --- what the script is given

    def enters(self, name: str, module: nn.Module) -> None:
        """Put the recorded weights and buffers in place."""
        self._keep(self._now[0])
        query, number = self._now
        if query.nudge and self.float64 and self._nudged_inside is None:
            self._generators.begin()  # which stays, so it must be the outer one
            self._nudged_inside = NudgedInside(query.nudge)
            self._nudged_inside.__enter__()  # type: ignore[no-untyped-call]
        record = self._reader(query.weights_of, number)
        if query.state.reports_buffers:
            self.now.left |= {name: whole(one) for name, one in self.names.buffers([name])}
        for inner, tensor in named_tensors(module):
            value = query.state.of(f"{name}:{inner}")
            value = record.tensor(f"weights/{name}:{inner}") if value is None else value
            put(value, tensor, query.nudge if isinstance(tensor, nn.Parameter) else 0)

    def _step_as_the_ranks(self, *given: object) -> None:
        """Leave the weights that the optimizer left on the ranks, if that is asked."""
        if self._after_step is not None:
            (after, parameters), self._after_step = self._after_step, None
            for name, parameter in self.names.live_parameters():
                put(after.tensor(f"weights/{name}") if name in parameters else None, parameter)

    def _keep(self, query: Query) -> None:
        """Keep a process where a step begins. In a fork of it, another query takes its place."""
        is_first = not self._answers and not self._fed_loaders.is_of_other_phase
        if query.keep and is_first and (asked := keep(query, self._line)) is not None:
            self._asked.replace_last(asked)

    def batches_of(self, loader: Any, iterator: Any) -> Iterator[Any]:
        """The rows of one query after the other, in the containers of the loader's own batches."""
        number = self.loaders.begins(loader)
        native, ended, first = None, False, self._fed_loaders.batches.get(number, 0)
        while not self._fed_loaders.ends_epoch(number, first):
            with self._generators.off():
                try:
                    native = native if ended else next(iterator)
                except StopIteration:
                    ended = True
            if ended and (native is None or not self._fed_loaders.is_fed(number)):
                return
            self.goes_on()  # the script goes on reading as long as there are questions
            batch = self._batch(number, native)
            self.was_read(number)
            yield batch

    def length_of(self, loader: Any, batches: int) -> int:
        """As many as it has on the ranks, or as an epoch that a query has to itself."""
        return self._fed_loaders.length_of(loader, batches)

    def given(self, loader: int) -> None:
        """Draw from here on what the ranks drew when they had got this batch."""
        if waiting := self._not_given.get(loader):
            query, sources = waiting.popleft()
            if query.logged and query is self._now[0]:
                self._begin_log()
            self._generators.use(sources, self._draws(query), query.row_order)

    def loader_begins(self) -> AbstractContextManager[None]:
        """The seed that torch draws for a loader makes no rows."""
        return self._generators.off()

    def _batch(self, loader: int, native: Any) -> Any:
        if not self._fed_loaders.feeds(loader):
            return native
        position = self._fed_loaders.next_batch(loader)
        self._keep(self._asked.of_batch(position)[0])
        query, place_in_query = self._asked.of_batch(position)
        pieces: Sequence[Piece] = query.micro_batches[place_in_query]
        where = {
            (one.rank, one.micro_batch): self._recorded_batches(one, query, loader)[one.micro_batch]
            for one in pieces
        }
        read = {
            (rank, number): self._reader(rank, step).rows(f"batch/{place}/")
            for (rank, number), (step, place) in where.items()
        }
        pieces = in_falling_order(pieces, [read[one.rank, one.micro_batch] for one in pieces])
        parts = [(read[one.rank, one.micro_batch], one.rows) for one in pieces]
        batch = self._put_into(parts, native)
        read_at = [(piece, *where[piece.rank, piece.micro_batch]) for piece in pieces]
        sources = [
            self._source(p, step, Event("batch", number=n).name(0)) for p, step, n in read_at
        ]
        self._not_given.setdefault(loader, deque()).append((query, sources))
        return batch

    def _recorded_batches(self, piece: Piece, query: Query, loader: int) -> list[tuple[int, int]]:
        """The (step, place) of every batch that a rank read from a loader in a query's steps."""
        wanted = self._fed_loaders.in_order.index(loader)
        return [
            (number, place)
            for number in query.steps
            for place, (one, _) in enumerate(self._reader(piece.rank, number).step.batches)
            if one == wanted
        ]

    def fed(self, name: str, arguments: Any, named: Any) -> tuple[Any, Any]:
        """The rows of the query, where the script has no loader."""
        if name == self._now[0].logged:
            self._begin_log()
        if self._told.feed != "calls":
            return arguments, named
        query, number = self._now
        backwards = len(self.now.losses)
        index = sum(1 for call in self.now.calls if call.backwards == backwards)
        parts = []
        for piece in query.micro_batches[backwards % len(query.micro_batches)]:
            record = self._reader(piece.rank, number)
            of = enumerate(record.step.calls)
            calls = [place for place, call in of if call.backwards == piece.micro_batch]
            if index >= len(calls):
                return arguments, named
            parts.append((record.rows(f"call/{calls[index]}/"), piece.rows))
        given = self._put_into(parts, (arguments, named), TOP_OF_CALL)
        return given[0], given[1]

    def _put_into(self, parts: Sequence[Part], native: Any, top: Collection[str] = TOP) -> Any:
        try:
            rows = joined(parts)
            return put_into(rows.changed(in_float64) if self.float64 else rows, native, top)
        except ValueError as error:
            self._line.refuse(str(error))

    def before_clip(self) -> None:
        """What happens to gradients from here on is not logged."""
        super().before_clip()
        if len(self.now.losses) >= len(self._now[0].micro_batches):
            self._end_log()

    def _begin_log(self) -> None:
        if self._operations is None and not self._logged:
            self._generators.begin()  # which stays, so it must be the outer one
            self._operations = LoggedOperations()

    def _end_log(self) -> None:
        if self._operations is None:
            return
        if self._operations.stop():
            path = self._line.folder / f"operations-{os.getpid()}-{self._line.answered}.pickle"
            self._operations.write(path, self.names.modules[self._now[0].logged])
            self._logged = str(path)
        self._operations = None

    def after_call(self, result: Any) -> None:
        """What is drawn between two calls makes the rows, where these are not those of a loader."""
        super().after_call(result)
        self._generators.counts = self._told.feed == "loader"

    def draws_like_the_record(self, event: Event) -> None:
        """Let torch draw what the ranks drew from here on."""
        query, number = self._now
        if self._draws(query):
            step = self._reader(query.ranks[0], number).step
            read = sum(loader == 0 for loader, _ in step.batches) - len(step.left_out)
            each = max(1, len(step.losses) // read) if read else 1  # passes of a micro-batch
            place, further = divmod(event.passes, each)
            pieces = query.micro_batches[place % len(query.micro_batches)]
            sources = [
                self._source(one, number, event.name(one.micro_batch * each + further))
                for one in pieces
            ]
            self._generators.counts = True
            self._generators.use(sources, True, query.row_order)

    def _source(self, piece: Piece, step: int, event: str) -> Source:
        record = self._reader(piece.rank, step)
        counts = record.batch_counts or record.call_counts or (0,)
        count = counts[min(piece.micro_batch, len(counts) - 1)]
        rows = piece.rows or ()
        all_made = len(rows) > count and sorted(rows) == [*range(len(rows))]  # made by the script
        return Source(record.tensor(event), count, None if all_made else piece.rows, piece.rank)

    def _draws(self, query: Query) -> bool:
        ranks = query.ranks
        return any(self._reader(r, number).step.draws for r in ranks for number in query.steps)
