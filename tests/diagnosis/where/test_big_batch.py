"""Own gradients and reduction are right: the report says what divides otherwise, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case
from tests.diagnosis.where.faulty import CASE, NEAR, Small, average, batch, distance, loss, where


def token_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Rows with different numbers of targets that count."""
    examples = batch(generator)
    counts = torch.arange(16) * 7 % 3 + 1
    examples["mask"] = (torch.arange(3) < counts[:, None]).long()
    return examples


def token_loss(model: Any, examples: dict[str, Tensor]) -> Any:
    square = (model(examples["rows"]) - examples["targets"]).square()
    return (square * examples["mask"]).sum() / examples["mask"].sum()


TOKENS = Case(model=Small, batch=token_batch, loss=token_loss, layout="1x2")


def pair_loss(model: Any, examples: dict[str, Tensor]) -> Any:
    scores = model(examples["rows"])
    return nn.functional.softplus(scores[1::2] - scores[0::2]).mean()


PAIRS = Case(model=Small, batch=batch, loss=pair_loss, layout="1x2", shards="own")


def pairs_dealt_apart(model: Any, whole: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    own = {name: value[rank.rank :: rank.world_size] for name, value in whole.items()}  # fault
    pair_loss(ddp, own).backward()


def micro_batch_means(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(4):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        value = token_loss(ddp, part) / 4  # fault
        value.backward()


def micro_batch_means_by_hand(model: Any, shard: Any, rank: Any) -> None:
    for begin, end in ((0, 5), (5, 8)):
        part = {name: value[begin:end] for name, value in shard.items()}
        (loss(model, part) / 2).backward()  # fault
    average(model)


def one_micro_batch_counts_twice(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        value = loss(model, part) / (2 - number)  # fault
        value.backward()
    average(model)


TWO = replace(CASE, layout="1x2")


@pytest.mark.parametrize(
    ("case", "step", "kind", "words"),
    [
        (TOKENS, micro_batch_means, "big batch", "the losses divide by"),
        (TWO, micro_batch_means_by_hand, "big batch", "divide by 5, 3, 5, 3"),
        (PAIRS, pairs_dealt_apart, "big batch", "blocks of its order would give"),
        (CASE, one_micro_batch_counts_twice, "own gradient", "backward pass 1 0.5"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_divides_otherwise_is_found(
    case: Case, step: Callable[..., Any], kind: str, words: str
) -> None:
    found = where(case, step)
    assert found.kind == kind
    assert words.casefold() in found.sentence.casefold()
    assert distance(found, step) <= NEAR
