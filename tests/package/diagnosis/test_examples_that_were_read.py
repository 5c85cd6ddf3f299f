"""What a report says of the examples that were read was seen, and equal rows support no claim."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.diagnosis.rows_read import ExamplesRead, examples_read
from ddp_equivalence.measurement.observation import (
    Backward,
    Forward,
    Indices,
    Observation,
    RowsRead,
)

EXAMPLES = 12
EQUAL = (5, 7, 8)
"""Examples whose rows equal that of example 2."""


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def equal_rows(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows that are equal, with other targets."""
    rows = torch.randn(EXAMPLES, 4, generator=generator)
    rows[list(EQUAL)] = rows[2].clone()
    return {"rows": rows, "targets": torch.randn(EXAMPLES, 3, generator=generator)}


def equal_examples(generator: torch.Generator) -> dict[str, Tensor]:
    batch = equal_rows(generator)
    batch["targets"][list(EQUAL)] = batch["targets"][2].clone()
    return batch


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def doubled(model: nn.Module, shard: Any, rank: Rank) -> None:
    ddp = DistributedDataParallel(model)
    (2 * loss(ddp, shard)).backward()


def doubled_on_copies(model: nn.Module, shard: Any, rank: Rank) -> None:
    """As a data loader hands rows on: nothing but their values shows which they are."""
    doubled(model, {name: tensor.clone() for name, tensor in shard.items()}, rank)


def own_half_doubled(model: nn.Module, batch: Any, rank: Rank) -> None:
    mine = torch.arange(rank.rank, EXAMPLES, rank.world_size)
    doubled(model, {name: tensor[mine] for name, tensor in batch.items()}, rank)


def all_but_the_last_two(model: nn.Module, batch: Any, rank: Rank) -> None:
    mine = torch.arange(rank.rank, EXAMPLES - 2, rank.world_size)
    ddp = DistributedDataParallel(model)
    loss(ddp, {name: tensor[mine] for name, tensor in batch.items()}).backward()


def report_of(batch: Any, step: Any, **changes: Any) -> str:
    case = Case(model=linear, batch=batch, loss=loss, layout="1x2", **changes)
    verdict = check(case, step)
    assert verdict.outcome == "different"
    return " ".join(verdict.full_report().split())


@pytest.mark.parametrize("batch", [equal_rows, equal_examples])
@pytest.mark.parametrize("step", [doubled, doubled_on_copies])
def test_equal_rows_of_right_shards_are_not_called_unread_or_read_twice(
    batch: Any, step: Any
) -> None:
    report = report_of(batch, step)
    assert "sum_not_mean" in report
    assert "12 of 12 examples read" in report
    assert " never" not in report.partition("Watched second run:")[2]
    assert "more than once" not in report


def test_equal_rows_that_a_step_takes_itself_support_no_claim() -> None:
    report = report_of(equal_rows, own_half_doubled, shards="own")
    assert " never" not in report.partition("Watched second run:")[2]
    assert "read more than once" not in report


def test_equal_examples_that_a_step_takes_itself_are_counted_together() -> None:
    report = report_of(equal_examples, own_half_doubled, shards="own")
    assert "12 of 12 examples read (4 of them have equal rows and cannot be told apart)" in report


def test_examples_that_are_dropped_beside_equal_ones_are_still_named() -> None:
    report = report_of(equal_examples, all_but_the_last_two, shards="own")
    assert "is not big_batch: examples_dropped" in report
    assert "no rank read examples 10, 11 (of 12)" in report


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, 9, (EXAMPLES, 6), generator=generator)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))


def next_token_of_every_other(model: nn.Module, ids: Tensor, rank: Rank) -> None:
    mine = range(rank.rank, EXAMPLES - 2, rank.world_size)
    ddp = DistributedDataParallel(model)
    next_token(ddp, ids[list(mine)]).backward()


def test_a_language_model_that_gets_all_tokens_but_the_last_shows_which_rows_it_read() -> None:
    case = Case(model=language_model, batch=tokens, loss=next_token, layout="1x2", shards="own")
    verdict = check(case, next_token_of_every_other)
    assert verdict.cause == "examples_dropped"
    assert "no rank read examples 10, 11 (of 12)" in " ".join(verdict.full_report().split())


def seen(*micro_batches: RowsRead, equal: tuple[Indices, ...] = ()) -> Observation:
    return Observation(
        forwards=tuple(Forward(rows, "", b"", 0, 0) for rows in micro_batches),
        backwards=tuple(
            Backward(1.0, number + 1, (None, None), 0) for number in range(len(micro_batches))
        ),
        wrappers=(),
        frozen=(),
        buffers="",
        gradients={},
        equal_examples=equal,
    )


def certain(*examples: int, part: str = "") -> RowsRead:
    return RowsRead(tuple((example,) for example in examples), part)


def test_parts_of_a_row_are_not_the_row_read_twice() -> None:
    """Back-propagation through time, in two pieces."""
    piece = [certain(0, 1, part="0+3"), certain(0, 1, part="3+3")]
    read = examples_read({0: seen(*piece)}, 0, None)
    assert isinstance(read, ExamplesRead)
    assert set(read.times.values()) == {1}


def test_more_equal_rows_than_there_are_examples_are_read_twice() -> None:
    rows = RowsRead(((0, 1), (0, 1), (0, 1)))
    read = examples_read({0: seen(rows, equal=((0, 1),))}, 0, None)
    assert isinstance(read, ExamplesRead)
    assert sorted(read.times.values()) == [1, 2]
    assert read.equal == {0, 1}


def test_equal_examples_are_shared_among_ranks() -> None:
    rank = seen(RowsRead(((0, 1),)), equal=((0, 1),))
    read = examples_read({0: rank, 1: rank}, 0, None)
    assert isinstance(read, ExamplesRead)
    assert read.by_rank == (((0,),), ((1,),))


def test_rows_that_are_equal_in_examples_with_other_targets_are_not_assigned() -> None:
    rank = seen(RowsRead(((0, 1),)))
    assert examples_read({0: rank, 1: rank}, 0, None) is None


def test_a_rank_reads_the_equal_row_that_it_was_given() -> None:
    rank = seen(RowsRead(((0, 1),)))
    read = examples_read({0: rank, 1: rank}, 0, {0: (1,), 1: (0,)})
    assert isinstance(read, ExamplesRead)
    assert read.by_rank == (((1,),), ((0,),))
