"""Which batches of which loaders a rank has trained with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.in_script.fetched import MOST_AHEAD, FetchedBatches
from ddp_equivalence.observed_scripts.rows import rows_of

TRAINING, OTHER = 0, 1


@pytest.fixture
def fetched() -> FetchedBatches:
    """Nothing was fetched yet."""
    return FetchedBatches()


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


def test_a_batch_is_of_the_step_in_which_a_module_is_trained_with_it(
    fetched: FetchedBatches,
) -> None:
    first = fetch(fetched, TRAINING, 1)
    fetch(fetched, TRAINING, 2)  # read ahead
    fetched.trained_with(first)
    fetched.step_ends()
    assert fetched.used == ((0, 0),)
    fetched.step_begins()
    fetched.trained_with(batch(2))
    fetched.step_ends()
    assert fetched.used == ((0, 1),)


def test_a_batch_that_is_not_recognised_is_of_the_step_that_follows(
    fetched: FetchedBatches,
) -> None:
    fetched.trained_with(fetch(fetched, TRAINING, 1) + 0.5)
    fetched.step_ends()
    assert fetched.used == ((0, 0),)


def test_a_batch_that_the_script_has_not_got_yet_is_of_no_step(fetched: FetchedBatches) -> None:
    """A loader of accelerate is a batch ahead, so that it knows which is the last one."""
    fetch(fetched, TRAINING, 1, given=False)
    fetch(fetched, TRAINING, 2, given=False)
    fetched.give(TRAINING)
    fetched.trained_with(batch(1) + 0.5)  # not recognised
    fetched.step_ends()
    assert fetched.used == ((0, 0),)
    first = fetched.batches_of_step()[0]
    assert first.generator is not None


def test_a_batch_may_be_given_again(fetched: FetchedBatches) -> None:
    """Such as by a loader that yields each batch of the one inside it twice."""
    rows = fetch(fetched, TRAINING, 1)
    fetched.give(TRAINING)
    fetched.trained_with(rows)
    fetched.step_ends()
    assert fetched.used == ((0, 0),)


def test_an_evaluation_is_not_training_even_on_the_same_rows(fetched: FetchedBatches) -> None:
    for number in (1, 2):
        fetched.evaluated_with(fetch(fetched, OTHER, number))
    fetched.reads_on(OTHER)  # there are no more
    fetched.trained_with(fetch(fetched, TRAINING, 1))
    fetched.step_ends()
    assert fetched.training == {TRAINING}
    assert (fetched.used, fetched.loaders) == (((0, 0),), (TRAINING,))


def test_an_evaluation_between_a_batch_and_its_use_changes_nothing(
    fetched: FetchedBatches,
) -> None:
    read_before = fetch(fetched, TRAINING, 1)
    fetched.evaluated_with(fetch(fetched, OTHER, 1))  # the same rows
    fetched.trained_with(read_before)
    fetched.step_ends()
    assert fetched.loaders == (TRAINING,)


def test_a_teacher_may_see_the_batch_before_the_student(fetched: FetchedBatches) -> None:
    rows = fetch(fetched, TRAINING, 1)
    fetched.evaluated_with(rows)
    fetched.trained_with(rows)
    fetch(fetched, TRAINING, 2)
    fetched.step_ends()
    assert fetched.used == ((0, 0),)
    assert len(fetched.batches_of_step()) == 1


def test_loaders_are_numbered_in_the_order_of_training(fetched: FetchedBatches) -> None:
    late, early = fetch(fetched, 4, 1), fetch(fetched, 7, 2)
    fetched.trained_with(early)
    fetched.trained_with(late)
    fetched.step_ends()
    assert (fetched.used, fetched.loaders) == (((0, 0), (1, 0)), (7, 4))


def test_batches_that_are_never_trained_with_are_forgotten(fetched: FetchedBatches) -> None:
    for number in range(MOST_AHEAD + 3):
        fetch(fetched, OTHER, number)
    fetched.trained_with(batch(1))  # too late: it is not kept any more
    assert fetched.used == ()
    fetched.trained_with(batch(MOST_AHEAD))
    assert fetched.batches_of_step()
