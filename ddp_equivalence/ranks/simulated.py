"""Simulated ranks: all ranks of a large layout in one process, as threads that take turns.

Torch has process groups for threads, with which it tests itself
(``torch.testing._internal.distributed.multi_threaded_pg``). So a step calls torch's own DDP, FSDP
and collectives here, on a thousand ranks. Only one rank runs at a time, until it waits for others.
This makes a run repeatable, gives each rank random numbers and environment variables of its own,
and shows at once when all ranks wait for one another. Nothing here is evidence of a backend.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import messages, process_state
from ddp_equivalence.ranks.collectives import is_of_the_suite
from ddp_equivalence.ranks.environment import torchrun_environment
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.users_line import counts_as_torch, users_line

BACKEND = "threaded"
"""The name of the backend of torch's groups for threads. By it torch knows that ranks share a
process, and gives each what it keeps by process elsewhere, such as what it knows of meshes."""

CPU = torch.device("cpu")

T = TypeVar("T")


class SimulatedCollective(NamedTuple):
    """``operation``: such as "all_reduce". ``reduction``: such as "SUM"; "" if it reduces nothing.
    ``ranks``: those that took part. ``elements``: how many each gave or got.
    """

    operation: str
    reduction: str
    ranks: tuple[int, ...]
    elements: int


class SimulatedRankFailed(Exception):
    """A simulated rank raised an exception, or the ranks wait for one another for ever.

    ``rank``: that rank, and ``stack`` its traceback; None and "" where all wait.
    """

    def __init__(self, what: str, rank: int | None = None, stack: str = "") -> None:
        super().__init__(what)
        self.rank, self.stack = rank, stack


class SimulatedWorld(Generic[T]):
    """The ranks of a layout. ``collectives``: how often the ranks issued each, but for the suite's
    own.

    A world is for a process of its own: inside ``run``, torch has process groups for threads only.
    """

    def __init__(self, layout: Layout) -> None:
        self.collectives: Counter[SimulatedCollective] = Counter()
        self._layout = layout
        self._results: dict[int, T] = {}
        self._turns = _Turns(layout.world_size)
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._sent: dict[tuple[int, int, int], deque[list[Tensor]]] = {}
        self._store = torch._C._distributed_c10d.HashStore()

    def run(self, work: Callable[[Rank], T]) -> list[T]:
        """Call the function for each rank, and return the results in the order of ranks.

        Raises SimulatedRankFailed.
        """
        with _groups_for_threads(self):
            threads = [
                threading.Thread(target=self._live, args=(row, work), daemon=True)
                for row in self._layout.rows
            ]
            for thread in threads:
                thread.start()
            self._turns.begin()
            for thread in threads:
                thread.join()
        if self._turns.failure is not None:
            raise self._turns.failure
        return [self._results[rank] for rank in range(self._layout.world_size)]

    def _live(self, row: RankPlace, work: Callable[[Rank], T]) -> None:
        place = (row.rank, row.world_size, row.local_rank, row.local_world_size)
        rank = Rank(*place, row.node, row.nodes, CPU, BACKEND)

        def live() -> None:
            dist.init_process_group(
                BACKEND, rank=row.rank, world_size=row.world_size, store=self._store
            )
            self._results[row.rank] = work(rank)

        self._turns.take(row.rank, torchrun_environment(row, port=1), live)

    def meet(self, group: dist.ProcessGroup, collective: Any, data: Any) -> Any:
        """Take part in a collective of the group; return a handle of torch's when it is done. An
        asynchronous one is done where it is issued, too.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if (here := self._turns.here.rank) != ranks[group.rank()]:
            owner = ranks[group.rank()]
            self._turns.give_up(
                f"rank {here} uses a process group of rank {owner}: simulated ranks share what "
                "their process keeps, such as code that torch.compile has compiled"
            )
        key = (str(group.group_name), ranks)
        meeting = self._meetings.setdefault(key, _Meeting(ranks))
        meeting.joined[group.rank()] = _Joined(collective, data, users_line(sys._getframe()))
        if len(meeting.joined) < len(ranks):
            self._turns.wait(meeting.missing, key)
        else:
            del self._meetings[key]
            if not is_of_the_suite():
                self.collectives[meeting.described()] += 1
            try:
                meeting.work()
            except Exception as error:  # nothing that the step could catch
                self._turns.give_up(str(error))
            self._turns.go_on(ranks, key)
        return _torchs().ret_work(data)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """Send copies to another rank, which need not wait for them yet."""
        key = (self._turns.here.rank, to, tag)
        copies = [one.detach().clone() for one in tensors]
        if not is_of_the_suite():
            ranks = (self._turns.here.rank, to)
            self.collectives[SimulatedCollective("send", "", ranks, copies[0].numel())] += 1
        self._sent.setdefault(key, deque()).append(copies)
        self._turns.go_on([to], key)
        return _torchs().ret_work(tensors)

    def has_sent(self, sender: int, tag: int) -> bool:
        """True if a message has come. Whoever asks again and again lets others run meanwhile."""
        key = (sender, self._turns.here.rank, tag)
        if not self._sent.get(key):
            self._turns.let_others_run()
        return bool(self._sent.get(key))

    def receive(self, tensors: list[Tensor], sender: int, tag: int) -> None:
        """Wait for what another rank sends."""
        key = (sender, self._turns.here.rank, tag)
        while not self._sent.get(key):
            self._turns.wait(lambda: f"a message of rank {sender}", key)
        for one, sent in zip(tensors, self._sent[key].popleft(), strict=True):
            one.detach().copy_(sent)


# Takes turns: which rank runs, and what each rank has to itself as a process would.


class _Abandoned(BaseException):
    """Another rank has failed, so this one ends as well."""


class _Here(threading.local):
    """The rank of this thread; -1 of a thread that is none."""

    rank = -1


TORCHRUN_NAMES = tuple(torchrun_environment(RankPlace(0, 0, 0, 1, 1, 1), 1))
"""The variables of which each rank has its own values."""


@dataclass
class _OwnOfAProcess:
    """``environment``: the variables that differ between ranks. ``scripts``: how the step has
    started its process group. The rest: the states of generators, and torch's default dtype.
    """

    environment: dict[str, str]
    scripts: list[Any] = field(default_factory=lambda: process_state.current_scripts[:])
    torchs: Tensor = field(default_factory=torch.get_rng_state)
    numpys: Any = field(default_factory=np.random.get_state)
    pythons: Any = field(default_factory=random.getstate)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @classmethod
    def now(cls) -> _OwnOfAProcess:
        return cls({name: os.environ[name] for name in TORCHRUN_NAMES if name in os.environ})

    def restore(self) -> None:
        for name in TORCHRUN_NAMES:
            os.environ.pop(name, None)
        os.environ.update(self.environment)
        torch.set_rng_state(self.torchs)
        np.random.set_state(self.numpys)
        random.setstate(self.pythons)
        torch.set_default_dtype(self.default_dtype)
        process_state.current_scripts[:] = self.scripts


class _Turns:
    """Lets one thread run at a time. ``failure``: why the ranks were given up."""

    def __init__(self, world_size: int) -> None:
        self.here = _Here()
        self.failure: SimulatedRankFailed | None = None
        self._locks = [threading.Semaphore(0) for _ in range(world_size)]
        self._ready = deque(range(world_size))
        self._waiting: dict[int, tuple[Callable[[], str], object]] = {}
        self._ended: set[int] = set()
        self._at_start = _OwnOfAProcess({})

    def begin(self) -> None:
        """Let the first rank run."""
        self._next()

    def take(self, rank: int, environment: dict[str, str], live: Callable[[], None]) -> None:
        """Let a rank live, from its first turn on. If it fails, all others are given up."""
        self.here.rank = rank
        self._locks[rank].acquire()
        try:
            if self.failure is None:
                replace(self._at_start, environment=environment).restore()
                live()
        except _Abandoned:
            pass
        except BaseException as error:
            described = messages.describe_exception(error)
            what = described["what"].splitlines()[-1]
            at = f" at {described['line'].partition(': ')[0]}" if described["line"] else ""
            self._fail(SimulatedRankFailed(f"{what}{at}", rank, described["detail"]))
        finally:
            self._ended.add(rank)
            self._next()

    def wait(self, what_for: Callable[[], str], key: object) -> None:
        """Let others run, until ``go_on`` calls who waits for this ``key``. ``what_for``: says it
        in words.
        """
        self._waiting[self.here.rank] = (what_for, key)
        self._until_its_turn()

    def go_on(self, ranks: Iterable[int], key: object) -> None:
        """These ranks may run again, as far as they wait for this."""
        for rank in ranks:
            if rank in self._waiting and self._waiting[rank][1] == key:
                del self._waiting[rank]
                self._ready.append(rank)

    def let_others_run(self) -> None:
        """Let each rank that can run have a turn, before this one goes on."""
        if self._ready:
            self._ready.append(self.here.rank)
            self._until_its_turn()

    def _until_its_turn(self) -> None:
        own = _OwnOfAProcess.now()
        self._next()
        self._locks[self.here.rank].acquire()
        if self.failure is not None:
            raise _Abandoned
        own.restore()

    def _next(self) -> None:
        if not self._ready and self._waiting:
            self._fail(SimulatedRankFailed(self._why_nobody_runs()))
        if self._ready:
            self._locks[self._ready.popleft()].release()

    def give_up(self, what: str) -> NoReturn:
        """End all ranks, this one as well."""
        self._fail(SimulatedRankFailed(what))
        raise _Abandoned

    def _fail(self, failure: SimulatedRankFailed) -> None:
        self.failure = self.failure or failure
        self._ready.extend(self._waiting)
        self._waiting.clear()

    def _why_nobody_runs(self) -> str:
        by_reason: dict[str, list[int]] = {}
        for rank, (what_for, _) in sorted(self._waiting.items()):
            by_reason.setdefault(what_for(), []).append(rank)
        waits = [f"{names_of(ranks)} for {why}" for why, ranks in by_reason.items()]
        ended = f"; {names_of(sorted(self._ended))} ended" if self._ended else ""
        return f"the ranks wait for ever: {'; '.join(waits)}{ended}"


def names_of(ranks: Sequence[int]) -> str:
    """Such as "rank 3", "ranks 0 to 7", "ranks 0, 8 ... 1016 (128 ranks)"."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else "no rank"
    step = ranks[1] - ranks[0]
    if step == 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"ranks {ranks[0]}, {ranks[1]} ... {ranks[-1]} ({len(ranks)} ranks)"


# One collective: its ranks come one after the other, and the last one moves the data.


MOST_TENSORS = 4
"""So many tensors of a collective are compared between ranks, beside their number."""


class _Joined(NamedTuple):
    """``collective``: as torch's groups for threads describe it. ``data``: the tensors that the
    rank gave. ``at``: the line of the user's that issued it; "" if there is none.
    """

    collective: Any
    data: Any
    at: str


@dataclass
class _Meeting:
    """One collective of a group. ``joined``: place in the group -> what this rank issued."""

    ranks: tuple[int, ...]
    joined: dict[int, _Joined] = field(default_factory=dict)

    def missing(self) -> str:
        """Which ranks it waits for, in words."""
        missing = [rank for place, rank in enumerate(self.ranks) if place not in self.joined]
        first = next(iter(self.joined.values()))
        at = f" at {first.at}" if first.at else ""
        return f"{names_of(missing)} in {_name(first.collective)} of {names_of(self.ranks)}{at}"

    def described(self) -> SimulatedCollective:
        """The collective, as the first rank of the group issued it."""
        collective, data, _ = self.joined[0]
        largest = max((one.numel() for one in _given(collective, data)), default=0)
        return SimulatedCollective(_name(collective), _reduction(collective), self.ranks, largest)

    def work(self) -> None:
        """Move the data. Raises ValueError if the ranks issued different collectives."""
        in_order = [self.joined[place] for place in range(len(self.ranks))]
        issued: dict[str, list[int]] = {}
        for place, one in enumerate(in_order):
            issued.setdefault(_in_words(one), []).append(place)
        if len(issued) > 1:
            each = "; ".join(
                f"{names_of([self.ranks[place] for place in places])} in {words}"
                + (f" at {in_order[places[0]].at}" if in_order[places[0]].at else "")
                for words, places in issued.items()
            )
            raise ValueError(f"ranks of a group are in different collectives: {each}")
        collective, data = in_order[0].collective, [one.data for one in in_order]
        kind = _KINDS.get(type(collective).__name__)
        with torch.no_grad():
            if kind is None:
                collective.work(data)
            else:
                kind.work(collective, data)


class _Kind(NamedTuple):
    """A collective that all ranks issue with tensors of the same shapes. ``given``: these tensors.
    ``work``: moves them, as torch's groups for threads do, but in few calls: with a thousand ranks,
    an all-gather has a million pairs.
    """

    given: Callable[[Any], list[Tensor]]
    work: Callable[[Any, list[Any]], None]


def _all_reduce(collective: Any, data: list[Any]) -> None:
    reduce = _reduction_of(collective)
    for of_ranks in zip(*data, strict=True):
        if of_ranks[0].is_sparse:  # a detached one has indices of its own, so copy to itself
            if collective.op != dist.ReduceOp.SUM:
                raise NotImplementedError(f"{_reduction(collective)} of sparse tensors")
            total = sum(of_ranks[1:], start=of_ranks[0])
            for one in of_ranks:
                one.copy_(total)
            continue
        flat = [one.detach() for one in of_ranks]
        torch._foreach_copy_(flat, [reduce(flat)] * len(flat))


def _all_gather(_: Any, data: list[Any]) -> None:
    gathered = [given[0].detach() for _, given in data]
    for outputs, _ in data:
        torch._foreach_copy_([one.detach() for one in outputs[0]], gathered)


def _all_gather_flat(_: Any, data: list[Any]) -> None:
    whole = torch.cat([given.detach().reshape(-1) for _, given in data])
    for output, _ in data:
        output.detach().view(-1).copy_(whole)


def _broadcast(collective: Any, data: list[Any]) -> None:
    for of_ranks in zip(*data, strict=True):
        source = of_ranks[collective.src].detach()
        others = [one.detach() for place, one in enumerate(of_ranks) if place != collective.src]
        if others:
            torch._foreach_copy_(others, [source] * len(others))


def _reduction_of(collective: Any) -> Callable[[list[Tensor]], Tensor]:
    known = _torchs()._reduce_ops
    op = getattr(collective.op, "op", collective.op)
    if op not in known:
        raise NotImplementedError(
            f"{_name(collective)} with {_reduction(collective)} is not simulated"
        )
    reduce: Callable[[list[Tensor]], Tensor] = known[op]
    return reduce


def _reduce(collective: Any, data: list[Any]) -> None:
    reduce = _reduction_of(collective)
    for of_ranks in zip(*data, strict=True):
        total = reduce([one.detach() for one in of_ranks])
        of_ranks[collective.root].detach().copy_(total)


def _reduce_scatter(collective: Any, data: list[Any]) -> None:
    reduce = _reduction_of(collective)
    for place, (outputs, _) in enumerate(data):
        outputs[0].detach().copy_(reduce([given[0][place].detach() for _, given in data]))


def _reduce_scatter_flat(collective: Any, data: list[Any]) -> None:
    total = _reduction_of(collective)([given.detach().reshape(-1) for _, given in data])
    for (output, _), part in zip(data, total.chunk(len(data)), strict=True):
        output.detach().view(-1).copy_(part)


class AllGatherFlat(NamedTuple):
    """An all-gather into one tensor, which torch's groups for threads would cut into pieces."""


class ReduceScatterFlat(NamedTuple):
    """A reduce-scatter out of one tensor, likewise."""

    op: Any


class Barrier(NamedTuple):
    """A barrier, which torch's groups for threads make of an all-reduce."""


class Reduce(NamedTuple):
    """The collective that torch's groups for threads lack: only rank ``root`` gets the sum."""

    op: Any
    root: int


_KINDS = {
    "AllGatherFlat": _Kind(lambda data: [data[1]], _all_gather_flat),
    "ReduceScatterFlat": _Kind(lambda data: [data[1]], _reduce_scatter_flat),
    "AllReduce": _Kind(list, _all_reduce),
    "AllGather": _Kind(lambda data: list(data[1]), _all_gather),
    "Barrier": _Kind(lambda data: [], lambda _, data: None),
    "Reduce": _Kind(list, _reduce),
    "Broadcast": _Kind(list, _broadcast),
    "ReduceScatter": _Kind(lambda data: list(data[1][0]), _reduce_scatter),
}


NAMES = {
    "AllGatherFlat": "all_gather_into_tensor",
    "ReduceScatterFlat": "reduce_scatter_tensor",
    "AllToAll": "all_to_all",
    "AllToAllBase": "all_to_all_single",
}
"""Names that do not follow from those of the classes."""


def _given(collective: Any, data: Any) -> list[Tensor]:
    kind = _KINDS.get(type(collective).__name__)
    if kind is not None:
        return kind.given(data)
    return [one for one in pytree.tree_leaves(data) if isinstance(one, Tensor)]


def _name(collective: Any) -> str:
    """The name of the function of ``torch.distributed`` that issues it."""
    kind = type(collective).__name__
    return NAMES.get(kind, re.sub("(?<=[a-z])(?=[A-Z])", "_", kind).lower())


def _reduction(collective: Any) -> str:
    op = getattr(collective, "op", None)
    return "" if op is None else str(getattr(op, "op", op)).rpartition(".")[2]


def _in_words(joined: _Joined) -> str:
    """The collective, and what must be the same on all ranks of its group."""
    name, kind = _name(joined.collective), _KINDS.get(type(joined.collective).__name__)
    if kind is None:  # each rank may give something else
        return name
    given = kind.given(joined.data)
    of = ", ".join(f"{list(one.shape)} {str(one.dtype)[6:]}" for one in given[:MOST_TENSORS])
    more = f" and {len(given) - MOST_TENSORS} more" if len(given) > MOST_TENSORS else ""
    root = getattr(joined.collective, "src", getattr(joined.collective, "root", None))
    words = (name, _reduction(joined.collective), of and f"of {of}{more}")
    return " ".join(filter(None, (*words, "" if root is None else f"with root {root}")))


# Gives torch groups for threads while a world runs.


def _torchs() -> Any:
    """Torch's groups for threads: a module of its own tests, which nothing else needs."""
    from torch.testing._internal.distributed import multi_threaded_pg

    return multi_threaded_pg


_worlds: list[SimulatedWorld[Any]] = []
"""The world that runs now, if one runs."""


@contextmanager
def _groups_for_threads(world: SimulatedWorld[Any]) -> Iterator[None]:
    """Inside the block each thread has process groups of its own, which meet in ``world``."""
    c10d: Any = torch._C._distributed_c10d
    torchs, isolate = _torchs(), c10d._set_thread_isolation_mode
    group = torchs.ProcessLocalGroup
    process_state.replace_functions()
    plugins = {BACKEND.upper(): dist.Backend._BackendPlugin(_make_group, False)}
    scripts, environment = process_state.current_scripts[:], dict(os.environ)
    _worlds.append(world)
    torchs._install_threaded_pg()
    isolate(True)
    try:
        with (
            patch.dict(dist.Backend._plugins, plugins),
            patch.object(group, "_start_coll", staticmethod(_Joining)),
            patch.object(group, "_end_coll", staticmethod(lambda *_: None)),
            patch.object(dist, "new_group", _new_group),
            patch.object(dist.distributed_c10d, "new_group", _new_group),
        ):
            yield
    finally:
        isolate(False)
        torchs._uninstall_threaded_pg()
        _worlds.pop()
        process_state.current_scripts[:] = scripts
        os.environ.clear()
        os.environ.update(environment)


class _Joining(NamedTuple):
    """A collective that a rank is about to take part in. Torch's groups call ``join``."""

    collective: Any
    group: Any

    def join(self, _: int, data: Any) -> Any:
        return _worlds[-1].meet(self.group, self.collective, data)


_torchs_new_group = dist.new_group


@wraps(_torchs_new_group)
@counts_as_torch
def _new_group(*arguments: Any, **named: Any) -> Any:
    """Make a group of threads, whatever backend the step asks for."""
    named |= dict(zip(("ranks", "timeout"), arguments, strict=False)) | {"backend": None}
    return _torchs_new_group(**named)


def _make_group(_store: object, rank: int, world_size: int, _timeout: object) -> Any:
    return _group_class()(rank, world_size)


@cache
def _group_class() -> Any:
    """Torch's groups for threads, and what they lack."""

    class Group(_torchs().ProcessLocalGroup):  # type: ignore[misc]
        def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
            return _worlds[-1].meet(self, AllGatherFlat(), (output, given))

        def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any) -> Any:
            return _worlds[-1].meet(self, ReduceScatterFlat(options.reduceOp), (output, given))

        # Torch called the two methods otherwise before version 2.13.
        _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

        def barrier(self, opts: Any = None) -> Any:
            return _worlds[-1].meet(self, Barrier(), [])

        def reduce(self, tensors: list[Tensor], options: Any) -> Any:
            op = getattr(options.reduceOp, "op", options.reduceOp)
            return _worlds[-1].meet(self, Reduce(op, options.rootRank), tensors)

        def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
            return _worlds[-1].send(tensors, dist.get_global_rank(self, to), tag)

        def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
            return _Receiving(tensors, dist.get_global_rank(self, sender), tag)

    return Group


class _Receiving(dist.Work):
    """A message that a rank expects. Only ``wait`` lets others run, so that two may swap some."""

    def __init__(self, tensors: list[Tensor], sender: int, tag: int) -> None:
        super().__init__()
        self._expected = (tensors, sender, tag)
        self._is_here = False

    def wait(self, *_: Any) -> bool:
        if not self._is_here:
            _worlds[-1].receive(*self._expected)
            self._is_here = True
        return True

    def is_completed(self) -> bool:
        if not self._is_here and _worlds[-1].has_sent(*self._expected[1:]):
            self.wait()
        return self._is_here
