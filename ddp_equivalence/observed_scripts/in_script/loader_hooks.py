"""Replaces what iterates over a DataLoader and tells its length, and tells a ``Watch``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, get_worker_info

from ddp_equivalence.ranks.torch_frames import counts_as_torch

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import Watch

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
    iterate = DataLoader.__iter__

    @counts_as_torch
    def watched(self: DataLoader[Any]) -> Any:
        if get_worker_info() is not None or not watch.is_on():
            return iterate(self)
        with watch.loader_begins():
            iterator = iterate(self)
        return _WatchedIterator(iterator, watch.batches_of(self, iterator))

    DataLoader.__iter__ = watched  # type: ignore[method-assign]
    length = DataLoader.__len__

    @counts_as_torch
    def counted(self: DataLoader[Any]) -> int:
        batches = length(self)
        return watch.length_of(self, batches) if watch.is_on() else batches

    DataLoader.__len__ = counted  # type: ignore[method-assign]
    for loader in _subclasses(DataLoader):
        _watch_own_iteration(loader, watch)

    @classmethod  # type: ignore[misc]
    def watch_subclass(cls: type[DataLoader[Any]], **named: Any) -> None:
        super(DataLoader, cls).__init_subclass__(**named)
        _watch_own_iteration(cls, watch)

    DataLoader.__init_subclass__ = watch_subclass  # type: ignore[method-assign,assignment]
    initialise = DataLoader.__init__

    @functools.wraps(initialise)
    def initialised(self: DataLoader[Any], *arguments: Any, **named: Any) -> None:
        for module, name in HAND_ON:  # a library that was imported by now may be making one
            if module in sys.modules:
                _watch_own_iteration(getattr(sys.modules[module], name), watch)
        initialise(self, *arguments, **named)
        watch.loaders.note_made(self)

    DataLoader.__init__ = initialised  # type: ignore[method-assign]


def _watch_own_iteration(loader: type[Any], watch: Watch) -> None:
    """Let ``watch`` know when a loader hands on what a loader inside it has yielded."""
    iterate: Any = loader.__iter__
    if iterate is DataLoader.__iter__ or hasattr(iterate, "hands_on"):
        return

    @counts_as_torch
    @functools.wraps(iterate)
    def watched(self: Any) -> Any:
        iterator = iterate(self)
        if get_worker_info() is not None or not watch.is_on():
            return iterator
        return _WatchedIterator(iterator, watch.handed_on(iterator))

    watched.hands_on = True  # type: ignore[attr-defined]
    loader.__iter__ = watched


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
