"""Lets the script compute, in one process, the gradient of whatever rows it is asked for."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.comparison.rounding import NudgedInside
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.observed_scripts.in_script.closer_look import LoggedOperations
from ddp_equivalence.observed_scripts.in_script.fetched import (
    AskedQueries,
    FedLoaders,
    RowsInTensor,
    default_generator,
    set_generator_state,
    state_for,
)
from ddp_equivalence.observed_scripts.in_script.kept_tensors import named_tensors, put, whole
from ddp_equivalence.observed_scripts.in_script.watch import Watch, place_of_caller
from ddp_equivalence.observed_scripts.queries import (
    Answer,
    Instructions,
    Query,
    RowOrder,
    path_of_kept,
)
from ddp_equivalence.observed_scripts.record import (
    Event,
    Piece,
    Record,
    Step,
    in_float64,
    text_of_line,
)
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
        if self._fed_loaders.was_of_other_phase():
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
        if not self._fed_loaders.feeds(loader):
            return native
        position = self._fed_loaders.next_batch(loader)
        self._keep(self._fed_loaders.of_batch(position)[0])
        query, place_in_query = self._fed_loaders.of_batch(position)
        parts, sources = [], []
        for piece in query.micro_batches[place_in_query]:
            step, place = self._recorded_batches(piece, query, loader)[piece.micro_batch]
            parts.append((self._record.step(piece.rank, step).batches[place], piece.rows))
            sources.append(self._source(piece, step, Event("batch", number=place)))
        batch = self._put_into(parts, native)
        self._not_given.setdefault(loader, deque()).append((query, sources))
        return batch

    def _recorded_batches(self, piece: Piece, query: Query, loader: int) -> list[tuple[int, int]]:
        """The (step, place) of every batch that a rank read from a loader in a query's steps."""
        wanted = self._fed_loaders.in_order.index(loader)
        return [
            (number, place)
            for number in query.steps
            for place, (one, _) in enumerate(self._record.step(piece.rank, number).used)
            if one == wanted
        ]

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
        return Source(
            record.generators.get(event), count, None if all_made else piece.rows, piece.rank
        )

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


# Lets one process draw, for the rows of several ranks, the random numbers that each rank drew.
#
# A random operation whose result has entries for each row of the batch is cut into parts, and
# each part is drawn by a generator in the state that its rank's was in.


@dataclass
class Source:
    """``state``: of a rank's generators; None if it is not known. ``count``: the rows of that rank.
    ``rows``: which of them are in this process's batch; None for all. ``rank``: its number.
    ``moved``: by the kind of device, the state in which what was drawn has left its generator.
    """

    state: Tensor | None
    count: int
    rows: tuple[int, ...] | None
    rank: int = 0
    moved: dict[str, Tensor] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """The number of its rows in this process's batch."""
        return self.count if self.rows is None else len(self.rows)

    def now(self, device: torch.device) -> Tensor | None:
        """The state of its generator. A device without a number is the current one."""
        if device.type in self.moved or self.state is None:
            return self.moved.get(device.type)
        return state_for(device, self.state)

    def draws(self, device: torch.device, draw: Callable[[], Any]) -> Any:
        """Let torch draw on this device, inside of ``draw``, what this source draws next."""
        generator, state = default_generator(device), self.now(device)
        assert generator is not None
        assert state is not None
        kept = generator.get_state()
        generator.set_state(state)
        try:
            return draw()
        finally:
            self.moved[device.type] = generator.get_state()
            generator.set_state(kept)


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in pairs
    )


States = list[dict[str, Tensor]]
"""For each source, what it has ``moved``."""


class RankGenerators(TorchDispatchMode):
    """``missed``: how often each operation, which draws no rows, drew what not every rank drew.

    ``counts``: whether that is counted now. ``alike``: the lines at which all ranks drew the same
    numbers for their rows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missed: dict[str, int] = {}
        self.alike: dict[str, None] = {}
        self.counts = True
        self._sources: list[Source] = []
        self._made: dict[int, None] = {}  # so many rows the script made on each rank by itself
        self._on = False
        self._row_order: RowOrder = "by row"

    def use(self, sources: Sequence[Source], draws: bool, row_order: RowOrder = "by row") -> None:
        """Draw from these from now on. ``draws``: the script draws random numbers at all.
        ``row_order``: that of what is drawn.
        """
        self._sources, self._row_order = [], row_order
        states = [source.state for source in sources if source.state is not None]
        if not draws or len(states) < len(sources):
            return
        if len(sources) == 1 and sources[0].rows is None:
            set_generator_state(states[0])
            return
        self._sources = list(sources)
        self.begin()

    def begin(self) -> None:
        """Be told of every operation from now on, until the process ends."""
        if not self._on:
            self._on = True
            self.__enter__()  # type: ignore[no-untyped-call]

    @property
    def active(self) -> bool:
        """This process draws for several sources now."""
        return bool(self._sources)

    def states(self) -> States:
        """The states of the sources now."""
        return [dict(one.moved) for one in self._sources]

    def restore(self, states: States) -> None:
        """Go back to states of the same sources."""
        if len(states) == len(self._sources):
            for one, moved in zip(self._sources, states, strict=True):
                one.moved = dict(moved)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Draw as usual inside the block, in which a loader makes a batch that is not used."""
        sources, self._sources = self._sources, []
        try:
            yield
        finally:
            self._sources = sources

    def forget(self) -> None:
        """Draw as usual from now on, where a step begins."""
        self._sources, self._made = [], {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        is_random = torch.Tag.nondeterministic_seeded in func.tags and func not in DRAW_NOTHING
        if not self._sources or not is_random or not drops_something(func, args, named):
            return func(*args, **named)
        if "out" in named or named.get("generator") is not None:
            return func(*args, **named)
        device = device_of(args, named)
        is_known = all(one.now(device) is not None for one in self._sources)
        writes = func._schema.is_mutable and func not in IN_PLACE
        if writes or not is_known or default_generator(device) is None:
            self._note_missed(func)  # it is not known what it writes to, or from what it draws
            return func(*args, **named)
        size: Sequence[int] = ()
        if func in IN_PLACE | MADE | LIKE:
            size = args[-1] if func in MADE else first_tensor(args).shape
        read = self._sources
        made = ([replace(one, count=rows, rows=None) for one in read] for rows in self._made)
        for sources in (read, *made):
            rows = sum(one.taken for one in sources)
            where = RowsInTensor.of(size, rows, self._row_order)
            if where is not None and not (where.dim and func in OF_DIM_0):
                self._note_alike(device)
                return _rows_drawn(sources, where, device, func, args, named)
        return self._drawn_by_each(device, func, args, named)

    def _drawn_by_each(
        self, device: torch.device, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        """Draw as the first rank did, where no rows are drawn: right if every rank drew the same.
        A new tensor for the rows of one rank becomes one for those of all.

        The generators of all ranks move on.
        """

        def draw() -> Any:
            drawn = func(*args, **named)
            return pytree.tree_map_only(Tensor, Tensor.clone, drawn)  # it may be written to again

        results = [one.draws(device, draw) for one in self._sources]
        if not all(_equal(results[0], one) for one in results):
            if func in MADE and (rows := self._rows_that_were_made(results)) is not None:
                return rows
            self._note_missed(func)
        return args[0].copy_(results[0]) if func in IN_PLACE else results[0]

    def _rows_that_were_made(self, made: Sequence[Tensor]) -> Tensor | None:
        """Join the rows of all ranks, if the script makes as many rows on each rank as it reads
        there, or a part of them, or a multiple, whatever its loader gives. None if these are none.
        """
        count, length = self._sources[0].count, len(made[0]) if made[0].ndim else 0
        if len(self._sources) < 2 or {one.count for one in self._sources} != {count}:
            return None
        if length == count:
            pairs = zip(made, self._sources, strict=True)
            return torch.cat([one if of.rows is None else one[list(of.rows)] for one, of in pairs])
        are_all = all(one.taken == count for one in self._sources)
        if length < 2 or (length % count and count % length) or not are_all:
            return None
        self._made[length] = None
        return torch.cat([*made])

    def _note_missed(self, func: Any) -> None:
        if self.counts:
            self.missed[str(func)] = self.missed.get(str(func), 0) + 1

    def _note_alike(self, device: torch.device) -> None:
        """Remember the line, if all ranks draw the same numbers for their rows there."""
        states = [one.now(device) for one in self._sources]
        if len({one.rank for one in self._sources}) > 1 and all(
            _equal(states[0], x) for x in states
        ):
            self.alike[text_of_line(place_of_caller())] = None


def _rows_drawn(
    sources: Sequence[Source],
    where: RowsInTensor,
    device: torch.device,
    func: Any,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
) -> Any:
    """The result of an operation that draws the rows of these sources."""
    counts = [one.taken for one in sources]
    ndim = len(args[-1]) if func in MADE else first_tensor(args).ndim

    def given(argument: Any, number: int, source: Source) -> Any:
        """An argument with all rows of one source in the place of those of every source."""
        if not isinstance(argument, Tensor) or argument.ndim != ndim:
            return argument
        if argument.shape[where.dim] != where.each * sum(counts):
            return argument
        first = sum(counts[:number])
        rows = where.rows_of(argument, range(first, first + counts[number]))
        if source.rows is not None:
            return where.with_rows(rows, source.count, source.rows)
        return where.empty(argument, source.count).copy_(rows)

    def joined(drawn: Sequence[Tensor]) -> Tensor:
        pairs = zip(drawn, sources, strict=True)
        return where.joined(
            [one if of.rows is None else where.rows_of(one, of.rows) for one, of in pairs]
        )

    results = []
    for number, source in enumerate(sources):
        if func in MADE:
            arguments = (*args[:-1], where.shape(args[-1], source.count))
        else:
            arguments = tuple(given(one, number, source) for one in args)
        results.append(source.draws(device, partial(func, *arguments, **named)))
    if isinstance(results[0], tuple):  # a dropout returns its mask too
        return tuple(map(joined, zip(*results, strict=True)))
    return args[0].copy_(joined(results)) if func in IN_PLACE else joined(results)


# Lets what a script does to the state of torch's generator hold for those of the ranks too.
#
# Activation checkpointing keeps the state before a part of the forward pass, and restores it to
# compute that part again in the backward pass, with the same random numbers.

MOST_REMEMBERED = 2_000
"""So many states are remembered, of which each has 5 KB for each rank."""


def follow_restored_states(generators: RankGenerators) -> None:
    """Replace the functions of torch that read and set the state of the CPU's generator."""
    remembered: dict[bytes, States] = {}

    def get_rng_state() -> Tensor:
        """The state, and another one each time, by which that of the ranks is known."""
        if not generators.active:
            return torch.default_generator.get_state()
        torch.rand([], generator=torch.default_generator)
        state = torch.default_generator.get_state()
        if len(remembered) >= MOST_REMEMBERED:
            remembered.pop(next(iter(remembered)))
        remembered[state.numpy().tobytes()] = generators.states()
        return state

    def set_rng_state(state: Tensor) -> None:
        torch.default_generator.set_state(state)
        if generators.active and (known := remembered.get(state.numpy().tobytes())) is not None:
            generators.restore(known)

    for module in (torch, torch.random):
        names: Any = module
        names.get_rng_state, names.set_rng_state = get_rng_state, set_rng_state


# The operations of torch that draw random numbers, and how each of them draws.

aten: Any = torch.ops.aten

IN_PLACE = {
    *(aten.bernoulli_.float, aten.bernoulli_.Tensor, aten.uniform_.default, aten.normal_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to),
    *(aten.exponential_.default, aten.log_normal_.default, aten.geometric_.default),
}
"""Operations that fill their first argument."""

MADE = {
    *(aten.rand.default, aten.randn.default, aten.normal.float_float),
    *(aten.randint.default, aten.randint.low),
}
"""Operations that make a tensor of a given size, which is the last of their arguments."""

LIKE = {
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.randint_like.default, aten.randint_like.low_dtype),
    *(aten.native_dropout.default, aten._fused_dropout.default),
    *(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor, aten.multinomial.default),
    *(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor),
}
"""Operations that make tensors with the rows of their first tensor. How many numbers they draw
depends on its shape alone. A dropout on a GPU is one of them; on the CPU it is made of others.
"""

OF_DIM_0 = {aten.multinomial.default}
"""The rows of these are in dim 0 at any rate."""

DRAW_NOTHING = {aten.empty_like.default, aten.native_dropout_backward.default}


def drops_something(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """False if an operation that may drop something, such as an attention, drops nothing."""
    given = {one.name: one.default_value for one in func._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | dict(named)
    of_dropout = "p" if "dropout" in str(func) else ""
    probability = next((given[n] for n in ("dropout_p", "dropout", of_dropout) if n in given), 1.0)
    return float(probability or 0.0) > 0.0 and given.get("train") is not False


def device_of(args: Sequence[Any], named: Mapping[str, Any]) -> torch.device:
    """Where an operation draws."""
    if named.get("device") is not None:
        return torch.device(named["device"])
    tensor = first_tensor(args)
    return torch.device("cpu") if tensor is None else tensor.device


def first_tensor(args: Sequence[Any]) -> Any:
    """The first tensor among the arguments; None if there is none."""
    return next((one for one in pytree.tree_leaves(args) if isinstance(one, Tensor)), None)
