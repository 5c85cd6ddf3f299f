"""The ranks' own gradients are right and reduced wrongly: the call and the line are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.where.faulty import CASE, NEAR, average, distance, loss, where


def maximum_instead_of_sum(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)  # fault


def rank_returns_early(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
    group = dist.new_group([0, 1, 2])
    if rank.rank == 3:
        return  # fault
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)


def reduced_to_one_rank(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad /= rank.world_size
        dist.reduce(parameter.grad, 0)  # fault


def wrong_modulo_of_no_sync(model: Any, shard: Any, rank: Any) -> None:
    ddp = DistributedDataParallel(model)
    for number in range(4):
        part = {name: value[number : number + 1] for name, value in shard.items()}
        if number % 3 == 2:  # fault
            (loss(ddp, part) / 4).backward()
        else:
            with ddp.no_sync():
                (loss(ddp, part) / 4).backward()


def weights_of_ranks(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    for parameter in model.parameters():
        parameter.grad *= (rank.rank + 1) / 10  # fault
        dist.all_reduce(parameter.grad)


def cleared_between_micro_batches(model: Any, shard: Any, rank: Any) -> None:
    for number in range(2):
        part = {name: value[2 * number : 2 * number + 2] for name, value in shard.items()}
        model.zero_grad()  # fault
        (loss(model, part) / 2).backward()
    average(model)


def tail_hook_on_one_rank(model: Any, shard: Any, rank: Any) -> None:
    if rank.rank == 2:
        model.head.weight.register_hook(lambda gradient: 3 * gradient)  # fault
    loss(model, shard).backward()
    average(model)


def tail_not_reduced(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    aligned = len(flat) // 13 * 13  # fault
    dist.all_reduce(flat[:aligned])
    flat[:aligned] /= rank.world_size
    _give_back(model, flat)


def tail_stays_zero(model: Any, shard: Any, rank: Any) -> None:
    loss(model, shard).backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    aligned = len(flat) // 13 * 13  # fault
    total, begin = torch.zeros_like(flat), flat[:aligned].clone()
    dist.all_reduce(begin)
    total[:aligned] = begin / rank.world_size
    _give_back(model, total)


def _give_back(model: Any, flat: Any) -> None:
    parts = flat.split([p.numel() for p in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.grad = part.view_as(parameter)


EVERY = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("step", "ranks", "parameters", "words"),
    [
        (maximum_instead_of_sum, EVERY, 8, "all_reduce with MAX over all ranks"),
        (rank_returns_early, EVERY, 8, "What rank 3 computed is not in these gradients"),
        (reduced_to_one_rank, (1, 2, 3), 8, "reduce with SUM"),
        (wrong_modulo_of_no_sync, EVERY, 8, "number 4 stayed on the rank itself"),
        (weights_of_ranks, EVERY, 8, "rank 0 0.1, rank 1 0.2, rank 2 0.3, rank 3 0.4"),
        (cleared_between_micro_batches, EVERY, 8, "number 1 left nothing"),
        (tail_hook_on_one_rank, (2,), 1, "rank 2 0.75"),
        (tail_not_reduced, EVERY, 1, "Elements 1 to 2 of head.bias are each rank's own"),
        (tail_stays_zero, EVERY, 1, "They are the last 2 of all 171 elements."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_reduction_is_found(
    step: Callable[..., Any], ranks: tuple[int, ...], parameters: int, words: str
) -> None:
    found = where(CASE, step)
    assert found.kind == "reduction"
    assert found.ranks == ranks
    assert len(found.parameters) == parameters
    assert words.casefold() in found.sentence.casefold()
    assert distance(found, step) <= NEAR
