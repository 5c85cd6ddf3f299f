"""The DataLoaders of a process: which batches were trained with, and how long epochs are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ddp_equivalence.observed_scripts.in_script.loaders import MOST_AHEAD, FetchedBatches, Loaders
from ddp_equivalence.observed_scripts.in_script.replayer import FedLoaders
from ddp_equivalence.observed_scripts.record import Epoch, Step
from ddp_equivalence.observed_scripts.rows import rows_of

TRAINING, OTHER = 0, 1


def batch(number: int) -> Tensor:
    """The batch with this number."""
    return torch.full((2, 3), float(number))


def fetch(fetched: FetchedBatches, loader: int, number: int, given: bool = True) -> Tensor:
    """The loader reads a batch, and the script gets it."""
    fetched.reads_on(loader)
    fetched.add(loader, rows_of(batch(number)))
    if given:
        fetched.give(loader)
    return batch(number)


def test_a_batch_is_of_the_step_in_which_a_module_is_trained_with_it() -> None:
    fetched = FetchedBatches()
    first = fetch(fetched, TRAINING, 1)
    fetch(fetched, TRAINING, 2)  # read ahead
    fetched.trained_with(first)
    fetched.step_ends()
    assert fetched.used == ((0, 0),)
    fetched.step_begins()
    fetched.trained_with(batch(2))
    fetched.step_ends()
    assert fetched.used == ((0, 1),)


def test_a_batch_that_the_script_has_not_got_yet_is_of_no_step() -> None:
    """A loader of accelerate is a batch ahead, and another one may give a batch twice."""
    fetched = FetchedBatches()
    fetch(fetched, TRAINING, 1, given=False)
    fetch(fetched, TRAINING, 2, given=False)
    fetched.give(TRAINING)
    fetched.trained_with(batch(1) + 0.5)  # not recognised: it is of the step that follows
    fetched.step_ends()
    assert fetched.used == ((0, 0),)
    assert fetched.of_step[0].generator is not None
    for _ in range(2):
        fetched.give(TRAINING)
    fetched.trained_with(batch(2))
    assert list(fetched.used) == [(0, 0), (0, 1)]


def test_an_evaluation_changes_nothing_even_on_the_same_rows() -> None:
    fetched = FetchedBatches()
    for number in (1, 2):
        fetched.evaluated_with(fetch(fetched, OTHER, number))
    fetched.reads_on(OTHER)  # there are no more
    read_before = fetch(fetched, TRAINING, 1)
    fetched.evaluated_with(read_before)  # such as by a teacher
    fetched.evaluated_with(fetch(fetched, OTHER, 1))
    fetched.trained_with(read_before)
    fetched.step_ends()
    assert (fetched.training, fetched.used, fetched.loaders) == ({TRAINING}, ((0, 0),), [TRAINING])
    assert len(fetched.of_step) == 1


def test_loaders_are_numbered_in_the_order_of_training() -> None:
    fetched = FetchedBatches()
    late, early = fetch(fetched, 4, 1), fetch(fetched, 7, 2)
    fetched.trained_with(early)
    fetched.trained_with(late)
    fetched.step_ends()
    assert (fetched.used, fetched.loaders) == (((0, 0), (1, 0)), [7, 4])


def test_batches_that_are_never_trained_with_are_forgotten() -> None:
    fetched = FetchedBatches()
    for number in range(MOST_AHEAD + 3):
        fetch(fetched, OTHER, number)
    fetched.trained_with(batch(1))  # too late: it is not kept any more
    assert fetched.used == ()
    fetched.trained_with(batch(MOST_AHEAD))
    assert fetched.of_step


# --- the length of an epoch


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class LengthIsSecret:
    """A batch sampler whose length is not known before its first epoch."""

    def __len__(self) -> int:
        raise RuntimeError("begin an epoch first")


@pytest.mark.parametrize(
    ("options", "epoch"),
    [
        ({"dataset": list(range(10)), "batch_size": 4}, Epoch(3, 2)),
        ({"dataset": list(range(10)), "batch_size": 5}, Epoch(2)),
        ({"dataset": list(range(10)), "batch_size": 4, "drop_last": True}, Epoch(2)),
        ({"dataset": Stream(), "batch_size": 4}, Epoch()),
        ({"dataset": [1, 2], "batch_sampler": LengthIsSecret()}, Epoch()),
    ],
)
def test_the_length_of_an_epoch_is_asked_of_the_loader(
    options: dict[str, Any], epoch: Epoch
) -> None:
    assert Loaders().epoch_of(DataLoader(**options)) == epoch
    assert Loaders().epoch_of(None) == Epoch()


def test_a_loader_is_known_by_its_first_iteration_or_by_how_many_were_made_before_it() -> None:
    loaders = Loaders()
    rows: Any = range(6)
    lost, kept, other = (DataLoader[int](rows) for _ in range(3))
    for one in (lost, kept):
        loaders.note_made(one)
    assert (loaders.made_as(kept), loaders.made_as(other)) == (1, None)
    assert loaders.epoch_of(kept) == Epoch(6, 0, made=1)
    assert [loaders.begins(one) for one in (other, kept, other)] == [0, 1, 0]
    assert loaders.begun == [other, kept]
    around = SimpleNamespace(base_dataloader=kept)  # as accelerate makes it
    assert (loaders.number_of(around), loaders.made_as(around)) == (1, 1)
    assert loaders.number_of(lost) is None


def test_a_loader_that_was_not_seen_keeps_its_length() -> None:
    """Neither was that of the ranks: then nothing says that they are the same one."""
    step = Step(loaders=(0,), epoch=Epoch(batches=3))
    record: Any = SimpleNamespace(feed="loader", steps=(0,), step=lambda *which: step)
    fed = FedLoaders(record, Loaders(), asked=None)  # type: ignore[arg-type]
    assert fed.length_of(DataLoader([0, 1]), 7) == 7  # type: ignore[arg-type]
