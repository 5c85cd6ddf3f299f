"""Lets the script compute, in one process, the gradient of whatever rows it is asked for."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_equivalence.comparison.rounding import NudgedInside
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.observed_scripts.in_script.closer_look import LoggedOperations
from ddp_equivalence.observed_scripts.in_script.draws import (
    RankGenerators,
    Source,
    follow_restored_states,
)
from ddp_equivalence.observed_scripts.in_script.kept_tensors import named_tensors, put, whole
from ddp_equivalence.observed_scripts.in_script.loaders import Loaders
from ddp_equivalence.observed_scripts.in_script.watch import Watch, end_process
from ddp_equivalence.observed_scripts.oracle import LEFT_OUT, MOST_TIMES
from ddp_equivalence.observed_scripts.queries import Answer, Instructions, Query, path_of_kept
from ddp_equivalence.observed_scripts.record import Event, Piece, Record, Step, in_float64
from ddp_equivalence.observed_scripts.rows import TOP, TOP_OF_CALL, Part, joined, put_into

# Before the script calls a module for the first time in a step, the module gets the weights and
# buffers that were recorded. Where the script reads a batch, it is given the rows of a ``Query``.


class Replayer(Watch):
    """``instructions``: where the record is, and where to ask what to compute."""

    def __init__(self, instructions: Instructions) -> None:
        super().__init__()
        self._record, self.float64 = Record(Path(instructions.folder)), instructions.float64
        self._asked = AskedQueries(instructions.socket)
        self._fed_loaders = FedLoaders(self._record, self.loaders, self._asked)
        self._answers: list[str] = []
        self._complete, self._generators = False, RankGenerators()
        follow_restored_states(self._generators)
        self._not_given: dict[int, deque[tuple[Query, list[Source]]]] = {}
        self._nudged_inside: NudgedInside | None = None
        self._operations: LoggedOperations | None = None
        self._logged: Operations | None = None
        self._after_step: tuple[Step, set[str]] | None = None
        self._last: tuple[int, int] | None = None  # step that was computed, as in ``left_by``
        register_optimizer_step_post_hook(self._step_as_the_ranks)

    @property
    def _now(self) -> tuple[Query, int]:
        """The query that is being computed, and the recorded step in it."""
        query = self._asked.now
        return query, query.steps[min(len(self._answers), len(query.steps) - 1)]

    def ends_step(self, optimizer: Any) -> None:
        """Answer, when all optimizers have stepped that stepped in the record."""
        of_other_phase = self._fed_loaders.is_of_other_phase
        self._fed_loaders.fed_in_step.clear()
        if of_other_phase:
            self.now = Step()
            return
        query, number = self._now
        record = self._record.step(query.ranks[0], number)
        if len(self.now.optimizers) < len(record.optimizers):
            return
        lowest = ""
        if self._nudged_inside is not None:
            self._nudged_inside.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            lowest = str(self._nudged_inside.lowest or "").removeprefix("torch.")
            self._nudged_inside = None
        self._end_log()
        # The script may be started several times, and be asked the same more than once.
        name = f"{query.number}-{os.getpid()}-{self._asked.answered}-{number}.pt"
        at = self._asked.folder / name
        if number + 1 in self._record.steps:
            self._after_step = self._record.step(0, number + 1), set(record.held)
        self.write(at, number=number, lowest=lowest, own_of_each=[], left_by=self._last)
        self._last = number, self.now.rows_of_calls
        self._answers.append(str(at))
        self._complete = True
        if len(self._answers) == len(query.steps):
            steps, drawn = tuple(self._answers), self._generators
            answer = Answer(query.number, steps, drawn.missed, self._logged, tuple(drawn.alike))
            drawn.missed, drawn.alike = {}, {}
            self._asked.answer(answer)
            self._answers, self._logged = [], None

    def goes_on(self) -> None:
        """Begin the next step."""
        if self._complete:
            self._complete = False
            self.now = Step()
            self._generators.forget()
            if self._answers:  # a further step of the same query
                self.draws_like_the_record(Event("start"))

    # --- what the script is given

    def enters(self, name: str, module: nn.Module) -> None:
        """Put the recorded weights and buffers in place."""
        self._keep(self._now[0])
        query, number = self._now
        if query.nudge and self.float64 and self._nudged_inside is None:
            self._generators.begin()  # which stays, so it must be the outer one
            self._nudged_inside = NudgedInside(query.nudge)
            self._nudged_inside.__enter__()  # type: ignore[no-untyped-call]
        record = self._record.step(0, number)
        self.now.left |= {name: whole(one) for name, one in self.names.buffers([name])}
        for inner, tensor in named_tensors(module):
            value = query.state.of(f"{name}:{inner}")
            value = record.states.get(f"{name}:{inner}") if value is None else value
            put(value, tensor, query.nudge if isinstance(tensor, nn.Parameter) else 0)

    def _step_as_the_ranks(self, *given: object) -> None:
        """Leave the weights that the optimizer left on the ranks: buffers may follow them."""
        if self._after_step is not None:
            (after, parameters), self._after_step = self._after_step, None
            for name, parameter in self.names.live_parameters():
                put(after.states.get(name) if name in parameters else None, parameter)

    def _keep(self, query: Query) -> None:
        """Keep a process where a step begins. In a fork of it, another query takes its place."""
        is_first = not self._answers and not self._fed_loaders.is_of_other_phase
        if query.keep and is_first:
            keep(query, self._asked)

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
        is_fed = self._fed_loaders.is_fed(loader)
        if self._fed_loaders.trains(loader):
            self._fed_loaders.fed_in_step.add(is_fed)
        if not is_fed:
            return native
        position = self._fed_loaders.next_batch(loader)
        self._keep(self._fed_loaders.of_batch(position)[1])
        _, query, place_in_query = self._fed_loaders.of_batch(position)
        parts, sources, wanted = [], [], self._fed_loaders.in_order.index(loader)
        for piece in query.micro_batches[place_in_query]:
            read = [
                (number, place)
                for number in query.steps
                for place, (one, _) in enumerate(self._record.step(piece.rank, number).used)
                if one == wanted
            ]
            step, place = read[piece.micro_batch]
            parts.append((self._record.step(piece.rank, step).batches[place], piece.rows))
            sources.append(self._source(piece, step, Event("batch", number=place)))
        batch = self._put_into(parts, native)
        self._not_given.setdefault(loader, deque()).append((query, sources))
        return batch

    def fed(self, name: str, arguments: Any, named: Any) -> tuple[Any, Any]:
        """The rows of the query, where the script has no loader."""
        if name == self._now[0].logged:
            self._begin_log()
        if self._record.feed != "calls":
            return arguments, named
        query, number = self._now
        backwards = len(self.now.losses)
        index = sum(1 for call in self.now.calls if call.backwards == backwards)
        parts = []
        for piece in query.micro_batches[backwards % len(query.micro_batches)]:
            of = self._record.step(piece.rank, number).calls
            calls = [call.rows for call in of if call.backwards == piece.micro_batch]
            if index >= len(calls):
                return arguments, named
            parts.append((calls[index], piece.rows))
        given = self._put_into(parts, (arguments, named), TOP_OF_CALL)
        return given[0], given[1]

    def _put_into(self, parts: Sequence[Part], native: Any, top: Collection[str] = TOP) -> Any:
        try:
            rows = joined(parts)
            return put_into(rows.changed(in_float64) if self.float64 else rows, native, top)
        except ValueError as error:
            self._asked.refuse(str(error))

    def before_clip(self) -> None:
        """End the log: what happens to gradients from here on is not compared."""
        super().before_clip()
        if len(self.now.losses) >= len(self._now[0].micro_batches):
            self._end_log()

    def _begin_log(self) -> None:
        if self._operations is None and self._logged is None:
            self._generators.begin()  # which stays, so it must be the outer one
            self._operations = LoggedOperations()

    def _end_log(self) -> None:
        if self._operations is not None:
            self._logged = self._operations.stopped(self.names.modules[self._now[0].logged])
            self._operations = None

    def after_call(self, result: Any) -> None:
        """Numbers drawn between two calls make the rows, where these are not those of a loader."""
        super().after_call(result)
        self._generators.counts = self._record.feed == "loader"

    def draws_like_the_record(self, event: Event) -> None:
        """Let torch draw what the ranks drew from here on."""
        query, number = self._now
        if self._draws(query):
            step = self._record.step(query.ranks[0], number)
            read = sum(loader == 0 for loader, _ in step.used)
            each = max(1, len(step.losses) // read) if read else 1  # passes of a micro-batch
            place, further = divmod(event.passes, each)
            pieces = query.micro_batches[place % len(query.micro_batches)]
            sources = [
                self._source(one, number, replace(event, passes=one.micro_batch * each + further))
                for one in pieces
            ]
            self._generators.counts = True
            self._generators.use(sources, True, query.row_order)

    def _source(self, piece: Piece, step: int, event: Event) -> Source:
        record = self._record.step(piece.rank, step)
        read = record.read_rows
        count = read[min(piece.micro_batch, len(read) - 1)].count if read else 0
        rows = piece.rows or ()
        all_made = len(rows) > count and sorted(rows) == [*range(len(rows))]  # made by the script
        taken = None if all_made else piece.rows
        return Source(record.generators.get(event, {}), count, taken, piece.rank)

    def _draws(self, query: Query) -> bool:
        ranks = query.ranks
        return any(self._record.step(r, number).draws for r in ranks for number in query.steps)


# Keeps a process at the beginning of each step, which answers what is asked of the step later.
#
# By then the script's process has gone on, and with it what the script holds in Python: a moving
# mean, a counter, a generator of its own. A fork of it still has what it held at the beginning.

MOST_KEPT = 16
"""Of more steps, only so many keep a process: each takes memory as the script goes on."""


def keep(query: Query, asked: AskedQueries) -> None:
    """Keep this process as it is before it computes a query. A fork of it that computes something
    else returns from here, too.
    """
    path = path_of_kept(asked.folder, query.steps)
    is_enough = len(list(asked.folder.glob("kept*"))) >= MOST_KEPT
    # A GPU, and processes that load data, answer one process only.
    cannot_be_forked = torch.cuda.is_initialized() or multiprocessing.active_children()
    if is_enough or path.exists() or cannot_be_forked:
        return
    state, goes_on = random.getstate(), os.getpid()  # Python seeds each fork anew
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    if os.fork():
        listener.close()
        return
    asked.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that compute
    listener.settimeout(1.0)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if os.getppid() != goes_on and not any(asked.folder.glob(f"{query.number}-*")):
                os._exit(1)  # the script has failed, and its launcher waits for all forks of it
            continue
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            random.setstate(state)
            torch.set_num_threads(1)  # a fork has no others, and would wait for them for ever
            _renew_groups()
            asked.asked_only_over(Connection(connection.detach()))
            return
        connection.close()


def _renew_groups() -> None:
    """Let the groups of one process reduce again: a fork has no threads of gloo."""
    for group in list(distributed_c10d._world.pg_map):
        if group.size() == 1 and "cpu:gloo" in str(dist.get_backend_config(group)):
            store = dist.HashStore()  # type: ignore[attr-defined]
            new = dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=5))
            kind = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device("cpu"), kind, new)


# The loaders through which a script gets the rows of the record, and how long their epochs are.


class FedLoaders:
    """``loaders``: those of this process, which iterates over the same ones as the ranks did.
    ``batches``: the number of the batch that each yields next, by the number of the loader.
    ``fed_in_step``: whether those that have yielded a batch for the step in progress were fed.
    """

    def __init__(self, record: Record, loaders: Loaders, asked: AskedQueries) -> None:
        self._record, self._loaders, self._asked = record, loaders, asked
        self.batches: dict[int, int] = {}
        self.fed_in_step: set[bool] = set()

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """Those with which rank 0 trained."""
        return self._record.step(0, self._record.steps[-1]).loaders

    def trains(self, loader: int) -> bool:
        """The ranks have trained with the loader that has this number."""
        return self._record.feed == "loader" and loader in self.in_order

    def is_fed(self, loader: int) -> bool:
        """It yields rows of the query that is computed now."""
        return self.trains(loader) and self._has(self._asked.now, loader)

    @property
    def is_of_other_phase(self) -> bool:
        """The step in progress is of a phase that has another loader than that of the query."""
        return self.fed_in_step == {False}

    def _has(self, query: Query, loader: int) -> bool:
        wanted = self.in_order.index(loader)
        steps = [self._record.step(query.ranks[0], number) for number in query.steps]
        return any(one == wanted for step in steps for one, _ in step.used)

    def next_batch(self, loader: int) -> int:
        """The number of the batch that a loader yields now, among those of all queries."""
        batch = self.batches.get(loader, 0)
        while not self._has(query := self.of_batch(batch)[1], loader):
            batch += len(query.micro_batches)
        self.batches[loader] = batch + 1
        return batch

    def length_of(self, loader: Any, batches: int) -> int:
        """How many batches a loader is said to have: as many as on the ranks, since a loss may
        depend on it, or as many as an epoch has that a query has to itself.
        """
        if self._record.feed != "loader":
            return batches
        number, epoch = self._loaders.number_of(loader), self._record.step(0, 0).epoch
        made = self._loaders.made_as(loader)
        if number is None and made is not None and made == epoch.made:
            number = self.in_order[0]  # it is asked before its first epoch
        if number is None or not self.is_fed(number):
            return batches
        if number == self.in_order[0] and epoch.batches:
            batches = epoch.batches
        # The epoch of the last batch that was read, if its query is not answered yet; or the next.
        next_batch = self.batches.get(number, 0)
        last = self.of_batch(next_batch - 1) if next_batch else None
        is_answered = last is None or last[0] < self._asked.answered
        _, query, _ = self.of_batch(next_batch) if last is None or is_answered else last
        return len(query.micro_batches) if query.is_epoch else batches

    def ends_epoch(self, loader: int, first: int) -> bool:
        """The epoch that began with the batch ``first`` has no more batches for the script: the
        query before the next batch, or its own, has an epoch to itself. Others go on as long as
        there are queries, unless the script does something else in their middle.
        """
        batch = self.batches.get(loader, 0)
        if batch == first or not self.is_fed(loader) or loader != self.in_order[0]:
            return False
        _, before, place = self.of_batch(batch - 1)
        if before.is_epoch and place == len(before.micro_batches) - 1:
            return True
        _, after, place = self.of_batch(batch)
        return after.is_epoch and place == 0

    def of_batch(self, batch: int) -> tuple[int, Query, int]:
        """The query to which a batch belongs, by its number among all that its loader yielded: the
        number of the query, itself, and the place of the batch in it.
        """
        number = 0
        while batch >= (count := len(self._asked.query(number).micro_batches)):
            number, batch = number + 1, batch - count
        return number, self._asked.query(number), batch


# The queries that a replay computes.


class AskedQueries:
    """Queries come over a socket, at which the judging process listens. The first use connects, so
    that processes which compute nothing, such as launchers, are silent. ``folder``: of the socket.
    ``answered``: the number of answers that were sent.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.folder = Path(path).parent
        self.answered = 0
        self._begun: list[Query] = []
        self._only: Query | None = None
        self._times = 0

    @cached_property
    def _connection(self) -> Connection:
        return Client(self._path, "AF_UNIX")

    def close(self) -> None:
        """Leave the connection to another process."""
        if "_connection" in vars(self):
            self._connection.close()

    def asked_only_over(self, connection: Connection) -> None:
        """From now on, answer only the query that comes over this connection, instead of the last
        that came.
        """
        self._connection = connection
        self._only = self._begun[-1] = connection.recv()

    def answer(self, answer: Answer) -> None:
        """Send an answer. Of several answers to a query the first one counts."""
        self._connection.send(("answer", answer))
        self.answered += 1
        if self._only is not None and answer.number == self._only.number:
            end_process()

    def refuse(self, reason: str) -> NoReturn:
        """Say why the query cannot be answered, and end the process."""
        self._connection.send(("cannot", " ".join(reason.split())))
        end_process()

    def query(self, number: int) -> Query:
        """The query with this number, in the order in which they are computed.

        A loader that reads ahead asks before it has answered the query before. If there is no
        other one yet, it is given the same again.
        """
        while len(self._begun) <= number:
            self._begun.append(self._next())
        return self._begun[number]

    def _next(self) -> Query:
        if self._only is not None:
            self._times += 1
            if self._times > MOST_TIMES:
                self.refuse(LEFT_OUT)
            return self._only
        try:
            self._connection.send(("next", self.answered))
            query: Query = self._connection.recv()
        except (EOFError, ConnectionError):  # there is none any more
            end_process()
        return query

    @property
    def now(self) -> Query:
        """The first that is not answered yet."""
        return self.query(self.answered)
