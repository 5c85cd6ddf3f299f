"""DDP itself, on real ranks: what it averages, hooks, and uneven inputs under Join."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.attacks.attack import Draw, attack, near
from tests.claims.attacks.gradients import (
    data,
    gradients_of,
    loss_of,
    new_model,
    whole,
)


@dataclass(frozen=True)
class Given:
    """What every rank is given: the examples of each, and how gradients are reduced."""

    sizes: tuple[int, ...]
    seed: int
    loss: str = "mse"
    same: bool = False
    adds_up: bool = False
    times: float = 1.0


def add_up(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not texts
    """A communication hook that does not divide."""
    reduced = dist.all_reduce(bucket.buffer(), async_op=True)
    return reduced.get_future().then(lambda done: done.value()[0])


def under_ddp(rank: Rank, given: Given) -> Tensor:
    """The gradient that this rank holds."""
    first = 0 if given.same else sum(given.sizes[: rank.rank])
    part = slice(first, first + given.sizes[rank.rank])
    model = new_model(given.seed)
    ddp = DistributedDataParallel(model)
    if given.adds_up:
        ddp.register_comm_hook(None, add_up)
    rows, targets = data(sum(given.sizes), given.seed)
    (given.times * loss_of(ddp(rows[part]), targets[part], given.loss)).backward()
    del ddp
    return gradients_of(model)


def on_real_ranks(given: Given) -> Tensor:
    held: tuple[Tensor, ...] = on_ranks(f"1x{len(given.sizes)}", under_ddp, given)
    assert all(torch.equal(one, held[0]) for one in held)
    return held[0]


def for_real_ranks(draw: Draw) -> dict[str, Any]:
    sizes = (draw.randint(1, 6),) * draw.randint(2, 4)
    return {"sizes": sizes, "seed": draw.randrange(10**6), "loss": draw.choice(["mse", "ce"])}


REAL_UNEVEN = {"sizes": (1, 6), "seed": 1}


@attack(
    "the_average_is_no_smaller_than_the_sum",
    "the_batch_size_of_a_loader_is_that_of_its_process",
    "batch_128_on_four_processes_is_512",
    "uneven_machines_are_not_the_big_batch",
    draw=for_real_ranks,
    outside=[REAL_UNEVEN],
)
def ddp_gives_the_big_batch(**given: Any) -> bool:
    one = Given(**given)
    return near(on_real_ranks(one), whole(one.sizes, one.seed, one.loss))


@attack(
    "the_gradient_does_not_grow_with_the_processes",
    draw=lambda draw: for_real_ranks(draw) | {"same": True},
    outside=[{"sizes": (4, 4), "seed": 1, "same": True, "adds_up": True}],
)
def ddp_leaves_the_same_examples_as_they_are(**given: Any) -> bool:
    one = Given(**given)
    model = new_model(one.seed)
    rows, targets = data(sum(one.sizes), one.seed)
    part = slice(0, one.sizes[0])
    loss_of(model(rows[part]), targets[part], one.loss).backward()
    return near(on_real_ranks(one), gradients_of(model))


@attack(
    "a_communication_hook_adds_up",
    draw=lambda draw: for_real_ranks(draw) | {"adds_up": True},
    outside=[{"sizes": (4, 4), "seed": 1}],
)
def a_hook_adds_up(**given: Any) -> bool:
    one = Given(**given)
    return near(on_real_ranks(one), len(one.sizes) * whole(one.sizes, one.seed, one.loss))


def batches_under_join(
    rank: Rank, counts: tuple[int, ...], seed: int, initial: bool
) -> list[Tensor]:
    """The gradients of the steps that this rank takes part in, with two examples each."""
    model = new_model(seed)
    ddp = DistributedDataParallel(model)
    found = []
    with warnings.catch_warnings(), Join([ddp], divide_by_initial_world_size=initial):
        for step in range(counts[rank.rank]):
            model.zero_grad()
            rows, targets = data(2 * len(counts), seed + step)
            part = slice(2 * rank.rank, 2 * rank.rank + 2)
            loss_of(ddp(rows[part]), targets[part], "mse").backward()
            found.append(gradients_of(model))
    del ddp
    return found


def joined(draw: Draw) -> dict[str, Any]:
    counts = tuple(draw.randint(0, 3) for _ in range(draw.randint(1, 3)))
    initial = draw.choice([True, False])
    return {"counts": (3, *counts), "seed": draw.randrange(10**6), "initial": initial}


def trained_under_join(
    rank: Rank, counts: tuple[int, ...], seed: int, momentum: float, epochs: int
) -> Tensor:
    model = new_model(seed)
    ddp = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=momentum)
    for epoch in range(epochs):
        with warnings.catch_warnings(), Join([ddp], divide_by_initial_world_size=False):
            for step in range(counts[rank.rank]):
                optimizer.zero_grad()
                rows, targets = data(2 * len(counts), seed + 10 * epoch + step)
                part = slice(2 * rank.rank, 2 * rank.rank + 2)
                loss_of(ddp(rows[part]), targets[part], "mse").backward()
                optimizer.step()
    del ddp
    return parameters_to_vector(model.parameters()).detach()


def trainings_under_join(draw: Draw) -> dict[str, Any]:
    momentum, epochs = draw.choice([(0.0, 1), (0.0, 2), (0.9, 1)])
    given = joined(draw)
    return {"counts": given["counts"], "seed": given["seed"]} | {
        "momentum": momentum,
        "epochs": epochs,
    }


@attack(
    "under_join_a_step_is_the_big_batch_of_what_is_left",
    draw=trainings_under_join,
    outside=[{"counts": (3, 2), "seed": 1, "momentum": 0.9, "epochs": 2}],
)
def join_trains_like_the_big_batches(
    counts: tuple[int, ...], seed: int, momentum: float, epochs: int
) -> bool:
    ends = on_ranks(f"1x{len(counts)}", trained_under_join, counts, seed, momentum, epochs)
    model = new_model(seed)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=momentum)
    for epoch in range(epochs):
        for step in range(max(counts)):
            left = [rank for rank, count in enumerate(counts) if count > step]
            numbers = [number for rank in left for number in (2 * rank, 2 * rank + 1)]
            rows, targets = data(2 * len(counts), seed + 10 * epoch + step)
            optimizer.zero_grad()
            loss_of(model(rows[numbers]), targets[numbers], "mse").backward()
            optimizer.step()
    one = parameters_to_vector(model.parameters()).detach()
    return all(near(end, one) for end in ends)


@attack(
    "under_join_a_step_is_the_big_batch_of_what_is_left",
    "under_join_every_example_weighs_the_same",
    draw=joined,
    outside=[{"counts": (2, 1), "seed": 1, "initial": True, "said": False}],
)
def join_divides_as_it_is_told(
    counts: tuple[int, ...], seed: int, initial: bool, said: bool | None = None
) -> bool:
    """``said``: what it was told, if that differs from how it divides."""
    held = on_ranks(f"1x{len(counts)}", batches_under_join, counts, seed, initial)[0]
    for step, gradient_of_step in enumerate(held):
        left = [rank for rank, count in enumerate(counts) if count > step]
        numbers = [number for rank in left for number in (2 * rank, 2 * rank + 1)]
        model = new_model(seed)
        rows, targets = data(2 * len(counts), seed + step)
        loss_of(model(rows[numbers]), targets[numbers], "mse", "sum").backward()
        by_initial = initial if said is None else said
        examples = 2 * (len(counts) if by_initial else len(left))
        if not near(gradient_of_step, gradients_of(model) / examples):
            return False
    return True
