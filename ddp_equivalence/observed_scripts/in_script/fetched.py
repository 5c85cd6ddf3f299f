"""The loaders of a script: the batches that they yield, on a rank and in a replay."""

from __future__ import annotations

import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.comparison.gradients import digest as digest_of
from ddp_equivalence.observed_scripts.in_script.around import around
from ddp_equivalence.observed_scripts.oracle import LEFT_OUT, MOST_TIMES
from ddp_equivalence.observed_scripts.queries import Answer, Query, RowOrder
from ddp_equivalence.observed_scripts.record import Epoch, Record
from ddp_equivalence.observed_scripts.rows import Rows

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import Watch


# The batches that a rank's loaders have yielded, until a model has been trained with them.

MOST_AHEAD = 64
"""So many batches of a loader are kept before the model was trained with one of them."""


@dataclass
class Fetched:
    """A batch of a loader. ``digests``: of its tensors. ``generator``: the state of torch's
    generators when the script got the batch; None if it has not got it yet.
    """

    rows: Rows
    digests: frozenset[str]
    generator: Tensor | None = None


@dataclass
class _Read:
    """The batches that a loader has yielded: None for those that are forgotten. The script has got
    so many of them (``given``), and trained with so many (``used``). ``evaluated``: the number of
    the last one that was only evaluated.
    """

    batches: list[Fetched | None] = field(default_factory=list)
    given: int = 0
    used: int = 0
    evaluated: int | None = None


class FetchedBatches:
    """``training``: the loaders that are trained with, and ``loaders`` those whose batches were
    used, in the order in which they first were. ``of_step``: the (loader, number) of each batch of
    the step in progress, in order. A loader has the number that its process gave it.
    """

    def __init__(self) -> None:
        self.training: set[int] = set()
        self.loaders: list[int] = []
        self.of_step: list[tuple[int, int]] = []
        self._read: defaultdict[int, _Read] = defaultdict(_Read)
        self._since_call: list[int] = []
        self._matched = False

    # --- what happens

    def reads_on(self, loader: int) -> None:
        """The loader is asked for another batch: what was only evaluated is forgotten."""
        read = self._read[loader]
        if read.evaluated is not None:
            read.batches[read.evaluated], read.evaluated = None, None

    def add(self, loader: int, rows: Rows) -> None:
        """Keep a batch until the model has been trained with it, or many others have come."""
        digests = frozenset(digest(tensor) for _, tensor in rows.all_tensors() if tensor.ndim)
        batches = self._read[loader].batches
        batches.append(Fetched(rows, digests))
        if len(batches) > MOST_AHEAD and loader not in self.training:
            batches[-1 - MOST_AHEAD] = None  # such as one of an evaluation

    def give(self, loader: int) -> None:
        """The script gets the first batch of a loader that it has not got yet."""
        read = self._read[loader]
        if read.given == len(read.batches):
            return  # the one around it gives a batch more than once
        if (batch := read.batches[read.given]) is not None:
            batch.generator = generator_state()
        read.given += 1
        self._since_call.append(loader)

    def trained_with(self, arguments: Any) -> None:
        """A module is trained with these arguments: note which batches they are of."""
        since, self._since_call = set(self._since_call), []
        matched = self._matching(arguments)
        for loader, number in matched.items():
            self._use(loader, number + 1)
            self._read[loader].evaluated = None  # such as by a teacher
            self._matched = True
        if not matched and not since:  # this is made of them, such as by a frozen encoder
            since = {loader for loader, one in self._read.items() if one.evaluated is not None}
            for loader in since:
                self._read[loader].evaluated = None
        self.training |= set(matched) or since

    def evaluated_with(self, arguments: Any) -> None:
        """A module is called without being trained: its batch does not make a training loader."""
        for loader, number in self._matching(arguments).items() if self._read else ():
            self._read[loader].evaluated = number
        self._since_call = [one for one in self._since_call if self._read[one].evaluated is None]

    def step_begins(self) -> None:
        """The last step has been written."""
        for loader, number in self.of_step:
            self._read[loader].batches[number] = None
        self.step_was_skipped()
        self._matched = False

    def step_was_skipped(self) -> None:
        """Forget which batches the step in progress has used."""
        self.of_step = []

    # --- what is asked

    def step_ends(self) -> None:
        """Where no batch was recognised in a call, the step used all that the script has got."""
        if not self._matched:
            for loader in self.training:
                self._use(loader, self._read[loader].given)

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        """As ``of_step``, with the loaders numbered in the order of ``loaders``."""
        return tuple((self.loaders.index(loader), number) for loader, number in self.of_step)

    def batches_of_step(self) -> Sequence[Fetched]:
        """The batches of the step in progress."""
        found = [self._read[loader].batches[number] for loader, number in self.of_step]
        return [one for one in found if one is not None]

    # --- matching

    def _matching(self, arguments: Any) -> dict[int, int]:
        """The first unused batch of each loader that has a tensor among these arguments.

        Two loaders may yield the same rows, as where a script also evaluates on its training data:
        the one is meant that was used before, or else that was read first.
        """
        given = {digest(one) for one in tensors_of(arguments) if one.ndim}
        found: dict[int, int] = {}
        for loader, read in sorted(self._read.items(), key=lambda one: (not one[1].used, one[0])):
            for number, batch in enumerate(read.batches[read.used :], start=read.used):
                if batch is not None and given.intersection(batch.digests):
                    given -= batch.digests
                    found[loader] = number
                    break
        return found

    def _use(self, loader: int, until: int) -> None:
        read = self._read[loader]
        for number in range(read.used, until):
            if read.batches[number] is not None:
                self.of_step.append((loader, number))
                if loader not in self.loaders:
                    self.loaders.append(loader)
        read.used = max(until, read.used)


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's values, whatever its shape."""
    return digest_of({str(tensor.dtype): tensor})


# The loaders through which a script gets the rows of the record, and how long their epochs are.


class FedLoaders:
    """``loaders``: those of this process, which iterates over the same ones as the ranks did.
    ``batches``: the number of the batch that each yields next, by the number of the loader.
    """

    def __init__(self, record: Record, loaders: Loaders, asked: AskedQueries) -> None:
        self._record, self._loaders, self._asked = record, loaders, asked
        self.batches: dict[int, int] = {}
        self._fed = set[bool]()

    @cached_property
    def in_order(self) -> tuple[int, ...]:
        """Those with which rank 0 trained."""
        return self._record.step(0, self._record.steps[-1]).loaders

    def is_fed(self, loader: int) -> bool:
        """The loader with this number yields rows of the query that is computed now."""
        return self._trains(loader) and self._has(self._asked.now, loader)

    def feeds(self, loader: int) -> bool:
        """``is_fed``, of a batch that it is about to yield for the step in progress."""
        is_fed = self.is_fed(loader)
        if self._trains(loader):
            self._fed.add(is_fed)
        return is_fed

    @property
    def is_of_other_phase(self) -> bool:
        """The step in progress is of a phase that has another loader than that of the query."""
        return self._fed == {False}

    def was_of_other_phase(self) -> bool:
        """``is_of_other_phase``, of the step that ends here."""
        is_other, self._fed = self.is_of_other_phase, set()
        return is_other

    def _trains(self, loader: int) -> bool:
        return self._record.feed == "loader" and loader in self.in_order

    def _has(self, query: Query, loader: int) -> bool:
        wanted = self.in_order.index(loader)
        steps = [self._record.step(query.ranks[0], number) for number in query.steps]
        return any(one == wanted for step in steps for one, _ in step.used)

    def next_batch(self, loader: int) -> int:
        """The number of the batch that a loader yields now, among those of all queries."""
        batch = self.batches.get(loader, 0)
        while not self._has(query := self.of_batch(batch)[0], loader):
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
        last = self._place_of(next_batch - 1)[0] if next_batch else -1
        is_answered = last < self._asked.answered
        query = self._asked.query(self._place_of(next_batch)[0] if is_answered else last)
        return len(query.micro_batches) if query.is_epoch else batches

    def ends_epoch(self, loader: int, first: int) -> bool:
        """The epoch that began with the batch ``first`` has no more batches for the script: the
        query before the next batch, or its own, has an epoch to itself. Others go on as long as
        there are queries, unless the script does something else in their middle.
        """
        batch = self.batches.get(loader, 0)
        if batch == first or not self.is_fed(loader) or loader != self.in_order[0]:
            return False
        before, place = self.of_batch(batch - 1)
        if before.is_epoch and place == len(before.micro_batches) - 1:
            return True
        after, place = self.of_batch(batch)
        return after.is_epoch and place == 0

    def of_batch(self, batch: int) -> tuple[Query, int]:
        """The query to which a batch belongs, by its number among all that its loader yielded, and
        its place there.
        """
        number, place = self._place_of(batch)
        return self._asked.query(number), place

    def _place_of(self, batch: int) -> tuple[int, int]:
        first, number = 0, 0
        while batch >= first + len(self._asked.query(number).micro_batches):
            first += len(self._asked.query(number).micro_batches)
            number += 1
        return number, batch - first


# The DataLoaders of a process, which another process of the script has as well.


class Loaders:
    """``begun``: those over which the script has iterated, in the order of the first time."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._made: list[weakref.ref[Any]] = []

    def note_made(self, loader: Any) -> None:
        """The script has made this loader."""
        self._made.append(weakref.ref(loader))

    def begins(self, loader: Any) -> int:
        """The script iterates over this loader. Returns its number, which is its place in
        ``begun``.
        """
        if id(loader) not in self._numbers:
            self._numbers[id(loader)] = len(self.begun)
            self.begun.append(loader)
        return self._numbers[id(loader)]

    def number_of(self, loader: Any) -> int | None:
        """The number of a loader, or of the one around which a library has put it; None before its
        first iteration.
        """
        return self._numbers.get(id(_inside_of(loader)))

    def made_as(self, loader: Any) -> int | None:
        """How many loaders the script had made before this one; None if it was not seen."""
        inside = _inside_of(loader)
        places = (place for place, known in enumerate(self._made) if known() is inside)
        return next(places, None)

    def epoch_of(self, loader: Any) -> Epoch:
        """The length of a loader's epochs, as far as it is known."""
        made, batches, last_rows = self.made_as(loader), 0, 0
        with suppress(Exception):  # of a stream, or whatever a sampler of the script's own raises
            batches = len(loader)
            size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
            if size and not getattr(loader, "drop_last", True) and isinstance(sampler, Sized):
                last_rows = len(sampler) % size
        return Epoch(batches, last_rows, made)


def _inside_of(loader: Any) -> Any:
    """Accelerate hands on the batches of a loader that it keeps under this name."""
    return getattr(loader, "base_dataloader", loader)


# Replaces what iterates over a DataLoader and tells its length, and tells a ``Watch``.

HAND_ON = (
    ("accelerate.data_loader", "DataLoaderShard"),
    ("accelerate.data_loader", "DataLoaderDispatcher"),
)
"""Classes that hand on what a DataLoader inside them yields, without being one themselves. Those of
accelerate read a batch ahead, to know which is the last.
"""


class _WatchedIterator:
    """Stands for the iterator of a loader, and has its attributes."""

    def __init__(self, iterator: Any, batches: Iterator[Any]) -> None:
        self._iterator = iterator
        self._batches = batches

    def __iter__(self) -> _WatchedIterator:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


def watch_loaders(watch: Watch) -> None:
    """Let ``watch`` say what the loaders yield, and how long they are."""

    def iterated(iterate: Any, loader: DataLoader[Any]) -> Any:
        if get_worker_info() is not None or not watch.is_on():
            return iterate(loader)
        with watch.loader_begins():
            iterator = iterate(loader)
        return _WatchedIterator(iterator, watch.batches_of(loader, iterator))

    def counted(length: Any, loader: DataLoader[Any]) -> int:
        batches: int = length(loader)
        return watch.length_of(loader, batches) if watch.is_on() else batches

    around(DataLoader, "__iter__", iterated)
    around(DataLoader, "__len__", counted)
    for kind in _subclasses(DataLoader):
        _watch_own_iteration(kind, watch)

    @classmethod  # type: ignore[misc]
    def watch_subclass(cls: type[DataLoader[Any]], **named: Any) -> None:
        super(DataLoader, cls).__init_subclass__(**named)
        _watch_own_iteration(cls, watch)

    DataLoader.__init_subclass__ = watch_subclass  # type: ignore[method-assign,assignment]

    def initialised(initialise: Any, loader: Any, *arguments: Any, **named: Any) -> None:
        for module, name in HAND_ON:  # a library that was imported by now may be making one
            if module in sys.modules:
                _watch_own_iteration(getattr(sys.modules[module], name), watch)
        initialise(loader, *arguments, **named)
        watch.loaders.note_made(loader)

    around(DataLoader, "__init__", initialised)


def _watch_own_iteration(kind: type[Any], watch: Watch) -> None:
    """Let ``watch`` know when a loader hands on what a loader inside it has yielded."""
    own: Any = kind.__iter__
    if own is DataLoader.__iter__ or hasattr(own, "hands_on"):
        return

    def iterated(iterate: Any, loader: Any) -> Any:
        iterator = iterate(loader)
        if get_worker_info() is not None or not watch.is_on():
            return iterator
        return _WatchedIterator(iterator, watch.handed_on(iterator))

    around(kind, "__iter__", iterated)
    kind.__iter__.hands_on = True


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


# Where a tensor has the entries of each row of a batch.


@dataclass(frozen=True)
class RowsInTensor:
    """``dim``: in which the rows follow one another. ``each``: so many entries of it belong to each
    row. ``in_blocks``: the first entries of all rows come first, and then the second ones;
    otherwise those of one row stand together.
    """

    dim: int
    each: int
    in_blocks: bool

    @classmethod
    def of(cls, shape: Sequence[int], rows: int, row_order: RowOrder) -> RowsInTensor | None:
        """Where a tensor of this shape has so many rows; None if it has none.

        A sequence model may have the time in dim 0 and the batch in dim 1, and numbers may belong
        to no row. The length of a dimension may be a multiple of the number of rows by chance:
        ``row_order`` says what is meant.
        """
        if not rows or not len(shape) or row_order == "no rows":
            return None
        if row_order == "in dim 1" and len(shape) > 2 and shape[1] == rows:
            return cls(1, 1, False)
        if not shape[0] or shape[0] % rows:
            return None
        return cls(0, shape[0] // rows, row_order == "in blocks")

    def shape(self, shape: Sequence[int], rows: int) -> list[int]:
        """The shape of a tensor that has so many rows, and is like one of this shape otherwise."""
        return [rows * self.each if dim == self.dim else size for dim, size in enumerate(shape)]

    def empty(self, tensor: Tensor, rows: int) -> Tensor:
        """A tensor of so many rows whose dimensions lie in memory as those of the other tensor do:
        random numbers are drawn in the order of the memory.
        """
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
        shape = self.shape(tensor.shape, rows)
        empty = tensor.new_empty([shape[dim] for dim in order])
        return empty.permute([order.index(dim) for dim in range(tensor.ndim)])

    def with_rows(self, tensor: Tensor, count: int, rows: Sequence[int]) -> Tensor:
        """A tensor of ``count`` rows, in which those with these numbers are those of ``tensor``.

        The others are 1, which is right as a probability and as a weight.
        """
        entries = self._entries(rows, count, tensor.device)
        return self.empty(tensor, count).fill_(1).index_copy_(self.dim, entries, tensor)

    def rows_of(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows with these numbers."""
        count = tensor.shape[self.dim] // self.each
        return tensor.index_select(self.dim, self._entries(rows, count, tensor.device))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all of them."""
        counts = [part.shape[self.dim] // self.each for part in parts]
        ends = list(accumulate(counts))
        all_rows = (range(end - count, end) for end, count in zip(ends, counts, strict=True))
        entries = [self._entries(rows, ends[-1], parts[0].device) for rows in all_rows]
        together = torch.cat([*parts], self.dim)
        return together.index_select(self.dim, torch.cat(entries).argsort())

    def _entries(self, rows: Sequence[int], count: int, device: torch.device) -> Tensor:
        """The places along ``dim`` of these rows of a tensor that has so many."""
        places = torch.arange(count * self.each, device=device)
        if self.in_blocks:
            return places.view(self.each, count)[:, list(rows)].flatten()
        return places.view(count, self.each)[list(rows)].flatten()


# The states of torch's default random generators in one process: the CPU's and its CUDA device's.
#
# Both are one tensor of bytes, as a record keeps them: first those of the CPU, then those of the
# device, if the process has used one. A dropout on a GPU draws from the generator of the GPU
# alone.

_followed: list[int] = []
"""The number of the device whose generator is followed, once it is known."""

BYTES_OF_CPU = torch.Generator().get_state().numel()


def follow_device(device: torch.device) -> None:
    """From now on, the CUDA device of this process is the one that its model is on: a script may
    never have made it the current one.
    """
    if device.type == "cuda" and device.index is not None:
        _followed[:] = [device.index]


def generator_state() -> Tensor:
    """The states of the default generators now."""
    states = [torch.default_generator.get_state()]
    if (of_device := _of_cuda_device()) is not None:
        states.append(of_device.get_state())
    return torch.cat(states)


def set_generator_state(state: Tensor) -> None:
    """Let the default generators be in these states, from ``generator_state``."""
    torch.default_generator.set_state(state[:BYTES_OF_CPU].clone())
    of_device = _of_cuda_device()
    if of_device is not None and len(state) > BYTES_OF_CPU:
        of_device.set_state(state[BYTES_OF_CPU:].clone())


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator from which this process draws on a device; None if its state is not kept."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _of_cuda_device() if index == _number() else None


def state_for(device: torch.device, state: Tensor) -> Tensor | None:
    """The part of ``generator_state`` that is of this device; None if it has none."""
    if device.type == "cpu":
        return state[:BYTES_OF_CPU].clone()
    return state[BYTES_OF_CPU:].clone() if len(state) > BYTES_OF_CPU else None


def _of_cuda_device() -> torch.Generator | None:
    """None if this process has not used CUDA yet, or if its CUDA is the CPU (``--as-cpu``)."""
    generators = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return generators[_number()] if generators else None


def _number() -> int:
    return _followed[0] if _followed else torch.cuda.current_device()


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


def end_process() -> NoReturn:
    """End this process, which has nothing more to do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
