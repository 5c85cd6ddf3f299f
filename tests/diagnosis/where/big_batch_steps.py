"""Steps whose own gradients and reduction are right, and whose big batch divides otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case
from tests.diagnosis.where.faulty import Small, average, batch, loss


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


def root_loss(model: Any, examples: dict[str, Tensor]) -> Any:
    return loss(model, examples).sqrt()


ROOT = Case(model=Small, batch=batch, loss=root_loss, layout="1x2")


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


def root_of_a_batch_mean(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    value = root_loss(ddp, shard)  # fault
    value.backward()


def one_micro_batch_counts_twice(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        value = loss(model, part) / (2 - number)  # fault
        value.backward()
    average(model)


def multiplied_by_a_constant(model: Any, shard: Any, rank: Any) -> None:
    value = loss(model, shard) * 1.3  # fault
    value.backward()
    average(model)
