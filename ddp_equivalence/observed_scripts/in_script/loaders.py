"""The loaders of a script: the batches that they yield, on a rank and in a replay."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.comparison.gradients import digest as digest_of
from ddp_equivalence.measurement.call_watch import subclasses_of
from ddp_equivalence.observed_scripts.in_script.around import around
from ddp_equivalence.observed_scripts.in_script.draws import generator_states
from ddp_equivalence.observed_scripts.record import Epoch, GeneratorStates
from ddp_equivalence.observed_scripts.rows import Rows

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import Watch


# The batches that a rank's loaders have yielded, until a model has been trained with them.

MOST_AHEAD = 64
"""So many batches of a loader are kept before the model was trained with one of them."""


@dataclass(eq=False)
class Fetched:
    """The batch with this number of a loader. ``digests``: of its tensors. ``generator``: the state
    of torch's generators when the script got the batch; None if it has not got it yet.
    """

    loader: int
    number: int
    rows: Rows
    digests: frozenset[str]
    generator: GeneratorStates | None = None


class FetchedBatches:
    """``training``: the loaders that are trained with, and ``loaders`` those whose batches were
    used, in the order in which they first were. ``of_step``: the batches of the step in progress,
    in order. A loader has the number that its process gave it.
    """

    def __init__(self) -> None:
        self.training: set[int] = set()
        self.loaders: list[int] = []
        self.of_step: list[Fetched] = []
        self._unused: defaultdict[int, list[Fetched]] = defaultdict(list)
        self._counts: Counter[int] = Counter()
        self._evaluated: dict[int, Fetched] = {}  # the last one of a loader, if only evaluated
        self._since_call: set[int] = set()
        self._matched = False

    # --- what happens

    def reads_on(self, loader: int) -> None:
        """The loader is asked for another batch: what was only evaluated is forgotten."""
        if (batch := self._evaluated.pop(loader, None)) in self._unused[loader]:
            self._unused[loader].remove(batch)

    def add(self, loader: int, rows: Rows) -> None:
        """Keep a batch until the model has been trained with it, or many others have come."""
        digests = frozenset(digest(tensor) for _, tensor in rows.all_tensors() if tensor.ndim)
        self._unused[loader].append(Fetched(loader, self._counts[loader], rows, digests))
        self._counts[loader] += 1
        if len(self._unused[loader]) > MOST_AHEAD and loader not in self.training:
            del self._unused[loader][0]  # such as one of an evaluation

    def give(self, loader: int) -> None:
        """The script gets the first batch of a loader that it has not got yet."""
        batch = next((one for one in self._unused[loader] if one.generator is None), None)
        if batch is not None:  # the one around it gives a batch more than once
            batch.generator = generator_states()
            self._since_call.add(loader)

    def trained_with(self, arguments: Any) -> None:
        """A module is trained with these arguments: note which batches they are of."""
        since, self._since_call = self._since_call, set()
        matched = self._matching(arguments)
        for batch in matched:
            self._use(one for one in self._unused[batch.loader] if one.number <= batch.number)
            self._evaluated.pop(batch.loader, None)  # such as by a teacher
            self._matched = True
        if not matched and not since:  # this is made of them, such as by a frozen encoder
            since, self._evaluated = set(self._evaluated), {}
        self.training |= {one.loader for one in matched} or since

    def evaluated_with(self, arguments: Any) -> None:
        """A module is called without being trained: its batch does not make a training loader."""
        if self._unused:
            self._evaluated |= {one.loader: one for one in self._matching(arguments)}
        self._since_call -= self._evaluated.keys()

    def step_begins(self) -> None:
        """The last step has been written."""
        self.step_was_skipped()
        self._matched = False

    def step_was_skipped(self) -> None:
        """Forget which batches the step in progress has used."""
        self.of_step = []

    # --- what is asked

    def step_ends(self) -> None:
        """Where no batch was recognised in a call, the step used all that the script has got."""
        for loader in self.training if not self._matched else ():
            self._use(one for one in self._unused[loader] if one.generator is not None)

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        """The (loader, number) of each batch of the step, with the loaders numbered in the order of
        ``loaders``.
        """
        return tuple((self.loaders.index(one.loader), one.number) for one in self.of_step)

    # --- matching

    def _matching(self, arguments: Any) -> list[Fetched]:
        """The first unused batch of each loader that has a tensor among these arguments.

        Two loaders may yield the same rows, as where a script also evaluates on its training data:
        the one is meant that was used before, or else that was read first.
        """
        given = {digest(one) for one in tensors_of(arguments) if one.ndim}
        found = []
        for loader in sorted(self._unused, key=lambda one: (one not in self.loaders, one)):
            batches = (one for one in self._unused[loader] if given & one.digests)
            if (batch := next(batches, None)) is not None:
                given -= batch.digests
                found.append(batch)
        return found

    def _use(self, batches: Iterable[Fetched]) -> None:
        for batch in list(batches):
            self._unused[batch.loader].remove(batch)
            self.of_step.append(batch)
            if batch.loader not in self.loaders:
                self.loaders.append(batch.loader)


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's values, whatever its shape."""
    return digest_of({str(tensor.dtype): tensor})


# The DataLoaders of a process, which another process of the script has as well.


class Loaders:
    """``begun``: those over which the script has iterated, in the order of the first time."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self._made: list[weakref.ref[Any]] = []

    def note_made(self, loader: Any) -> None:
        """The script has made this loader."""
        self._made.append(weakref.ref(loader))

    def begins(self, loader: Any) -> int:
        """The script iterates over this loader. Returns its number, which is its place in
        ``begun``.
        """
        if (number := _place_of(loader, self.begun)) is not None:
            return number
        self.begun.append(loader)
        return len(self.begun) - 1

    def number_of(self, loader: Any) -> int | None:
        """The number of a loader, or of the one around which a library has put it; None before its
        first iteration.
        """
        return _place_of(_inside_of(loader), self.begun)

    def made_as(self, loader: Any) -> int | None:
        """How many loaders the script had made before this one; None if it was not seen."""
        return _place_of(_inside_of(loader), [known() for known in self._made])

    def epoch_of(self, loader: Any) -> Epoch:
        """The length of a loader's epochs, as far as it is known."""
        made, batches, last_rows = self.made_as(loader), 0, 0
        with suppress(Exception):  # of a stream, or whatever a sampler of the script's own raises
            batches = len(loader)
            size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
            if size and not getattr(loader, "drop_last", True) and isinstance(sampler, Sized):
                last_rows = len(sampler) % size
        return Epoch(batches, last_rows, made)


def _place_of(loader: Any, among: Sequence[Any]) -> int | None:
    return next((place for place, one in enumerate(among) if one is loader), None)


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
    for kind in subclasses_of(DataLoader):
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
