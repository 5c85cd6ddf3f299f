"""What torch's own samplers and loaders read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from tests.claims.attacks.attack import Draw, attack


def read(examples: int, ranks: int, batch: int, **how: bool) -> list[list[list[int]]]:
    """For each rank the numbers that it reads, by step."""
    numbers: Any = list(range(examples))
    found = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(
            numbers,
            ranks,
            rank,
            drop_last=how.get("sampler_drops", False),
            seed=rank if how.get("own_seeds") else 0,
        )
        if how.get("own_epochs"):
            sampler.set_epoch(rank)
        loader: Any = DataLoader(
            numbers, batch, sampler=sampler, drop_last=how.get("loader_drops", False)
        )
        found.append([one.tolist() for one in loader])
    return found


def flat(by_rank: list[list[list[int]]]) -> Iterator[int]:
    """The numbers that all ranks read."""
    return chain.from_iterable(chain.from_iterable(by_rank))


def divisible(draw: Draw) -> dict[str, Any]:
    ranks = draw.choice([2, 4])
    batch = draw.randint(1, 6)
    return {"ranks": ranks, "batch": batch, "examples": 4 * draw.randint(1, 40)}


@attack(
    "other_numbers_of_processes_see_the_same_batches",
    draw=lambda draw: divisible(draw),
    outside=[{"ranks": 4, "batch": 3, "examples": 41}],
)
def the_same_examples_in_every_step(ranks: int, batch: int, examples: int) -> bool:
    one = [set(step) for step in read(examples, 1, batch * ranks)[0]]
    several = read(examples, ranks, batch)
    together = [
        {number for rank in several for number in rank[step]} for step in range(len(several[0]))
    ]
    return one == together and sum(map(len, one)) == len(list(flat(several)))


@attack(
    "a_sampler_reads_every_example_once",
    draw=divisible,
    outside=[
        {"ranks": 4, "batch": 3, "examples": 41},
        {"ranks": 4, "batch": 3, "examples": 40, "loader_drops": True},
        {"ranks": 4, "batch": 4, "examples": 16, "own_seeds": True},
        {"ranks": 4, "batch": 4, "examples": 16, "own_epochs": True},
    ],
)
def every_example_is_read_once(ranks: int, batch: int, examples: int, **how: bool) -> bool:
    numbers = flat(read(examples, ranks, batch, **how))
    return sorted(numbers) == list(range(examples))


def any_reading(draw: Draw) -> dict[str, Any]:
    return {
        "ranks": draw.randint(1, 6),
        "batch": draw.randint(1, 7),
        "examples": draw.randint(8, 120),
        "sampler_drops": draw.choice([True, False]),
        "loader_drops": draw.choice([True, False]),
    }


@attack(
    "a_thousand_examples_by_32_on_two_processes_are_16_steps",
    "the_two_drop_last_drop_different_things",
    draw=any_reading,
    outside=[
        {
            "ranks": 4,
            "batch": 10,
            "examples": 41,
            "sampler_drops": True,
            "loader_drops": False,
            "one_switch": True,
        }
    ],
)
def steps_and_drops_are_those_of_the_formulas(
    ranks: int,
    batch: int,
    examples: int,
    sampler_drops: bool,
    loader_drops: bool,
    one_switch: bool = False,
) -> bool:
    """``one_switch``: the formulas take the loader's drop_last for the sampler's, too."""
    found = read(examples, ranks, batch, sampler_drops=sampler_drops, loader_drops=loader_drops)
    if one_switch:
        sampler_drops = loader_drops
    each = examples // ranks if sampler_drops else math.ceil(examples / ranks)
    steps = each // batch if loader_drops else math.ceil(each / batch)
    numbers = list(flat(found))
    never = examples - len(set(numbers))
    most = (ranks - 1 if sampler_drops else 0) + ((batch - 1) * ranks if loader_drops else 0)
    return {len(rank) for rank in found} == {steps} and never <= most


@attack(
    "a_sampler_shuffles_anew_with_set_epoch",
    draw=lambda draw: divisible(draw) | {"examples": 4 * draw.randint(5, 40)},
    outside=[
        {"ranks": 2, "batch": 2, "examples": 40, "numbers": (None, None)},
        {"ranks": 2, "batch": 2, "examples": 40, "numbers": (0, 0)},
    ],
)
def every_epoch_has_an_order_of_its_own(
    ranks: int, batch: int, examples: int, numbers: tuple[int | None, ...] = (0, 1)
) -> bool:
    dataset: Any = list(range(examples))
    sampler: Any = DistributedSampler(dataset, ranks, 0)
    orders = []
    for number in numbers:
        if number is not None:
            sampler.set_epoch(number)
        orders.append(list(sampler))
    return orders[0] != orders[1]


@attack(
    "ddp_does_not_share_out_the_data",
    draw=divisible,
    outside=[{"ranks": 2, "batch": 2, "examples": 40, "sampler": True}],
)
def without_a_sampler_all_ranks_read_all(
    ranks: int, batch: int, examples: int, sampler: bool = False
) -> bool:
    dataset: Any = list(range(examples))
    found = []
    for rank in range(ranks):
        dealt: Any = DistributedSampler(dataset, ranks, rank) if sampler else None
        same_seed = torch.Generator().manual_seed(5)
        loader = DataLoader(
            dataset, batch, sampler=dealt, shuffle=None if sampler else True, generator=same_seed
        )
        found.append([one.tolist() for one in loader])
    all_read = all(sorted(chain.from_iterable(one)) == dataset for one in found)
    return all_read and all(one == found[0] for one in found)
