"""The DataLoaders of a process, their numbers and the lengths of their epochs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddp_equivalence.observed_scripts.in_script.fetched import FedLoaders, Loaders
from ddp_equivalence.observed_scripts.recorded_step import Epoch


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class LengthIsSecret:
    """A batch sampler whose length is not known before its first epoch."""

    def __len__(self) -> int:
        raise RuntimeError("begin an epoch first")


def test_the_length_of_an_epoch_is_asked_of_the_loader() -> None:
    rows = list(range(10))
    assert Loaders().epoch_of(DataLoader(rows, batch_size=4)) == Epoch(3, 2)  # type: ignore[arg-type]
    assert Loaders().epoch_of(DataLoader(rows, batch_size=5)) == Epoch(2)  # type: ignore[arg-type]
    assert Loaders().epoch_of(DataLoader(rows, batch_size=4, drop_last=True)) == Epoch(2)  # type: ignore[arg-type]


def test_a_loader_that_does_not_know_its_length_makes_no_script_fail() -> None:
    assert Loaders().epoch_of(None) == Epoch()
    assert Loaders().epoch_of(DataLoader(Stream(), batch_size=4)) == Epoch()
    secret: Any = LengthIsSecret()
    assert Loaders().epoch_of(DataLoader([1, 2], batch_sampler=secret)) == Epoch()  # type: ignore[arg-type]


def loader() -> DataLoader[int]:
    return DataLoader(list(range(6)), batch_size=2)  # type: ignore[arg-type]


def test_a_loader_has_the_number_of_its_first_iteration() -> None:
    loaders = Loaders()
    first, second = loader(), loader()
    assert (loaders.begins(second), loaders.begins(first), loaders.begins(second)) == (0, 1, 0)
    assert loaders.begun == [second, first]
    assert (loaders.number_of(first), loaders.number_of(loader())) == (1, None)


def test_a_loader_is_known_by_how_many_were_made_before_it() -> None:
    loaders = Loaders()
    kept, other = loader(), loader()
    for one in (loader(), kept):  # nobody keeps the first one
        loaders.note_made(one)
    assert loaders.made_as(kept) == 1
    assert loaders.made_as(other) is None
    assert loaders.epoch_of(kept) == Epoch(3, 0, made=1)


def test_a_loader_around_another_one_has_its_number() -> None:
    """As those that accelerate makes."""
    loaders, inside = Loaders(), loader()
    loaders.note_made(inside)
    loaders.begins(inside)
    around = SimpleNamespace(base_dataloader=inside)
    assert (loaders.number_of(around), loaders.made_as(around)) == (0, 0)


def test_a_loader_that_was_not_seen_keeps_its_length() -> None:
    """Neither was that of the ranks: then nothing says that they are the same one."""
    told: Any = SimpleNamespace(feed="loader")
    fed = FedLoaders(told, Loaders(), asked=None)  # type: ignore[arg-type]
    vars(fed).update(in_order=(0,), _epoch=Epoch(batches=3, made=None))
    assert fed.length_of(loader(), 7) == 7
