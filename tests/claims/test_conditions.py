"""Random set-ups attack the condition of each claim, 200 for each, and counter-examples break it.

An attack shares no code with the claim's test: ranks are simulated in one process with autograd,
and samplers are torch's own. A counter-example lies outside the condition, and there the same check
must fail. Claims without a number to vary are listed with the reason.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.claims import page

SETUPS = 200
FEATURES, OUTPUTS = 4, 3

Draw = random.Random
Holds = Callable[..., bool]


@dataclass(frozen=True)
class Attack:
    """``draw``: makes the arguments of ``holds`` within the condition. ``outside``: arguments for
    which ``holds`` must be False; None if the claim has no condition to leave.
    """

    claims: tuple[str, ...]
    draw: Callable[[Draw], dict[str, Any]]
    holds: Holds
    outside: tuple[dict[str, Any], ...]


ATTACKS: list[Attack] = []


def attack(
    *claims: str, draw: Callable[[Draw], dict[str, Any]], outside: Sequence[dict[str, Any]]
) -> Callable[[Holds], Holds]:
    """Attack these claims with the decorated check."""

    def decorate(holds: Holds) -> Holds:
        ATTACKS.append(Attack(tuple(f"test_{one}" for one in claims), draw, holds, tuple(outside)))
        return holds

    return decorate


NOT_ATTACKED = {
    "test_init_process_group_starts_no_second_process": "a number of processes that hangs has no "
    "condition; the test itself waits for one that never comes",
    "test_device_ids_are_for_gpus_only": "there is one CPU to name",
    "test_equal_gradients_can_train_worse": "it is a list of suspects, each measured",
}


def near(found: Tensor, expected: Tensor, limit: float = 1e-9) -> bool:
    return bool((found - expected).norm() <= limit * expected.norm())


def new_model(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(FEATURES, OUTPUTS).double()
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.double)
        parameter.data.copy_(drawn)
    return model


def data(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    rows = torch.randn(examples, FEATURES, generator=generator, dtype=torch.double)
    return rows, torch.randn(examples, OUTPUTS, generator=generator, dtype=torch.double)


def loss_of(outputs: Tensor, targets: Tensor, loss: str, reduction: str = "mean") -> Tensor:
    """One value for each example, as a mean or a sum."""
    if loss == "mse":
        each = (outputs - targets).square().mean(1)
    elif loss == "l1":
        each = (outputs - targets).abs().mean(1)
    elif loss == "class weights":
        weights = torch.tensor([10.0, 1.0, 1.0], dtype=torch.double)
        return F.cross_entropy(outputs, targets.argmax(1), weights, reduction=reduction)
    elif loss == "batch norm":
        each = (F.batch_norm(outputs, None, None, training=True) - targets).square().mean(1)
    else:
        each = F.cross_entropy(outputs, targets.argmax(1), reduction="none")
    return each.mean() if reduction == "mean" else each.sum()


def gradient(sizes: Sequence[int], seed: int, loss: str, reduction: str = "mean") -> list[Tensor]:
    """The gradient of the loss of each consecutive part of the examples."""
    model = new_model(seed)
    rows, targets = data(sum(sizes), seed)
    found, first = [], 0
    for size in sizes:
        part = slice(first, first + size)
        first += size
        value = loss_of(model(rows[part]), targets[part], loss, reduction)
        found.append(
            torch.cat([one.flatten() for one in torch.autograd.grad(value, [*model.parameters()])])
        )
    return found


def whole(sizes: Sequence[int], seed: int, loss: str, reduction: str = "mean") -> Tensor:
    return gradient([sum(sizes)], seed, loss, reduction)[0]


def equal_sizes(draw: Draw) -> dict[str, Any]:
    sizes = [draw.randint(1, 6)] * draw.randint(2, 8)
    return {"sizes": sizes, "seed": draw.randrange(10**6), "loss": draw.choice(["mse", "l1", "ce"])}


def any_sizes(draw: Draw) -> dict[str, Any]:
    sizes = [draw.randint(1, 6) for _ in range(draw.randint(2, 8))]
    return equal_sizes(draw) | {"sizes": sizes}


UNEVEN = {"sizes": [1, 6], "seed": 1, "loss": "mse"}


@attack(
    "data_parallel_adds_up_and_ddp_averages",
    "the_average_is_no_smaller_than_the_sum",
    "the_mean_of_two_losses_is_the_big_batch",
    "the_batch_size_of_a_loader_is_that_of_its_process",
    "batch_128_on_four_processes_is_512",
    "sum_inside_and_average_between_is_the_big_batch",
    "uneven_machines_are_not_the_big_batch",
    draw=equal_sizes,
    outside=[
        UNEVEN,
        {"sizes": [8, 8], "seed": 1, "loss": "class weights"},
        {"sizes": [8, 8], "seed": 1, "loss": "batch norm"},
    ],
)
def the_average_of_means_is_the_big_batch(sizes: list[int], seed: int, loss: str) -> bool:
    average = torch.stack(gradient(sizes, seed, loss)).mean(0)
    return near(average, whole(sizes, seed, loss))


@attack("the_sum_is_too_large_only_for_added_losses", draw=equal_sizes, outside=[UNEVEN])
def added_means_are_as_many_times_too_large(sizes: list[int], seed: int, loss: str) -> bool:
    added = torch.stack(gradient(sizes, seed, loss)).sum(0)
    return near(added, len(sizes) * whole(sizes, seed, loss))


@attack(
    "a_sum_times_the_world_size_is_the_big_batch",
    "only_a_sum_is_multiplied_by_the_world_size",
    "a_communication_hook_adds_up",
    draw=lambda draw: any_sizes(draw) | {"reduction": "sum"},
    outside=[{"sizes": [4, 4], "seed": 1, "loss": "mse", "reduction": "mean"}],
)
def an_averaged_loss_times_the_world_size(
    sizes: list[int], seed: int, loss: str, reduction: str
) -> bool:
    average = torch.stack(gradient(sizes, seed, loss, reduction)).mean(0)
    return near(len(sizes) * average, whole(sizes, seed, loss, reduction))


@attack(
    "the_gradient_does_not_grow_with_the_processes",
    draw=lambda draw: {"processes": draw.randint(1, 64), "seed": draw.randrange(10**6)},
    outside=[{"processes": 4, "seed": 1, "reduce": "sum"}],
)
def the_same_examples_on_all(processes: int, seed: int, reduce: str = "mean") -> bool:
    one = gradient([4], seed, "mse")[0]
    return near(getattr(torch.stack([one] * processes), reduce)(0), one)


def token_counts(draw: Draw) -> dict[str, Any]:
    total, counts = draw.randint(4, 12), []
    for _ in range(draw.randint(2, 4)):
        cut = sorted(draw.sample(range(1, total), draw.randint(0, 3)))
        counts.append([end - begin for begin, end in zip([0, *cut], [*cut, total], strict=True)])
    return {"counts": counts, "seed": draw.randrange(10**6)}


@attack(
    "equal_batch_sizes_are_not_equal_token_counts",
    draw=token_counts,
    outside=[{"counts": [[6, 6], [1, 1]], "seed": 1}],
)
def means_over_tokens_are_averaged(counts: list[list[int]], seed: int) -> bool:
    """Sequences of these many tokens on each rank: a token is an example here."""
    sizes = [sum(one) for one in counts]
    return the_average_of_means_is_the_big_batch(sizes, seed, "ce")


@attack(
    "accumulation_multiplies_the_effective_batch",
    draw=lambda draw: equal_sizes(draw) | {"divide": True},
    outside=[equal_sizes(Draw(1)) | {"divide": False}, UNEVEN | {"divide": True}],
)
def accumulated_means(sizes: list[int], seed: int, loss: str, divide: bool) -> bool:
    added = torch.stack(gradient(sizes, seed, loss)).sum(0)
    return near(added / (len(sizes) if divide else 1), whole(sizes, seed, loss))


def windows(draw: Draw) -> dict[str, Any]:
    return {"ranks": draw.randint(2, 6), "steps": draw.randint(2, 6), "seed": draw.randrange(10**6)}


@attack(
    "no_sync_only_saves_all_reduces",
    draw=windows,
    outside=[{"ranks": 2, "steps": 2, "seed": 1, "reduce": "sum"}],
)
def without_no_sync(ranks: int, steps: int, seed: int, reduce: str = "mean") -> bool:
    """Every backward reduces what has accumulated; with no_sync only the last one does."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(steps, ranks, 7, generator=generator, dtype=torch.double)
    held = torch.zeros(ranks, 7, dtype=torch.double)
    for micro_batch in own:
        held = getattr(held + micro_batch, reduce)(0).expand(ranks, -1)
    return near(held[0], getattr(own.sum(0), reduce)(0))


# --- training


def trained(
    optimizer: Callable[..., torch.optim.Optimizer],
    sizes: Sequence[int],
    seed: int,
    *,
    factor: float = 1.0,
    max_norm: float = 0.0,
    clip_first: bool = False,
    steps: int = 5,
    ranks: bool = True,
) -> Tensor:
    """The way of the weights over some steps. ``ranks``: the average of the means of each size
    times ``factor``; otherwise the mean of all.
    """
    model = new_model(seed)
    begin = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    made = optimizer(model.parameters())
    for step in range(steps):
        rows, targets = data(sum(sizes), seed + 10 * step + 10)
        first, parts = 0, []
        for size in sizes if ranks else [sum(sizes)]:
            part = slice(first, first + size)
            first += size
            value = loss_of(model(rows[part]), targets[part], "mse")
            parts.append(torch.autograd.grad(value, [*model.parameters()]))
            if clip_first:
                parts[-1] = clipped(parts[-1], max_norm)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = factor * torch.stack([one[number] for one in parts]).mean(0)
        if max_norm and not clip_first:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        made.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - begin


def clipped(gradients: tuple[Tensor, ...], max_norm: float) -> tuple[Tensor, ...]:
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    return tuple(one * min(1.0, max_norm / float(norm)) for one in gradients)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam


def any_optimizer(draw: Draw) -> Any:
    lr, decay = 10 ** draw.uniform(-3, -1), draw.choice([0.0, 0.1])
    return draw.choice(
        [
            partial(SGD, lr=lr, momentum=draw.choice([0.0, 0.9]), weight_decay=decay),
            partial(ADAM, lr=lr, eps=1e-3, weight_decay=decay),
            partial(torch.optim.AdamW, lr=lr, eps=1e-3, weight_decay=decay),
            partial(torch.optim.RMSprop, lr=lr, eps=1e-3, weight_decay=decay),
        ]
    )


def a_training(draw: Draw) -> dict[str, Any]:
    given = equal_sizes(draw)
    return {
        "sizes": given["sizes"],
        "seed": given["seed"],
        "optimizer": any_optimizer(draw),
        "max_norm": draw.choice([0.0, 10 ** draw.uniform(-2, 1)]),
    }


@attack(
    "two_machines_train_as_one_with_data_parallel",
    "half_the_batch_per_process_keeps_the_learning_rate",
    "optimizers_with_a_state_train_like_the_big_batch",
    "clipping_is_that_of_the_big_batch",
    "ddp_keeps_ranks_alike_that_go_on_from_a_checkpoint",
    draw=a_training,
    outside=[
        {"sizes": [1, 6], "seed": 1, "optimizer": partial(SGD, lr=0.1)},
        {
            "sizes": [3, 3],
            "seed": 1,
            "optimizer": partial(SGD, lr=0.1),
            "max_norm": 0.3,
            "clip_first": True,
        },
    ],
)
def ranks_train_as_one(
    sizes: list[int], seed: int, optimizer: Any, max_norm: float = 0.0, clip_first: bool = False
) -> bool:
    mine = trained(optimizer, sizes, seed, max_norm=max_norm, clip_first=clip_first)
    return near(mine, trained(optimizer, sizes, seed, max_norm=max_norm, ranks=False), 1e-7)


def summed_under_sgd(draw: Draw) -> dict[str, Any]:
    given = equal_sizes(draw)
    return {"sizes": given["sizes"], "seed": given["seed"], "lr": 10 ** draw.uniform(-3, -1)}


@attack(
    "a_sum_over_processes_needs_the_learning_rate_divided",
    draw=summed_under_sgd,
    outside=[
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "optimizer": ADAM},
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "more": {"weight_decay": 0.5}},
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "max_norm": 0.1},
        {"sizes": [1, 6], "seed": 1, "lr": 0.05},
    ],
)
def a_divided_rate_makes_up_for_a_sum(
    sizes: list[int],
    seed: int,
    lr: float,
    optimizer: Any = SGD,
    more: dict[str, float] | None = None,
    max_norm: float = 0.0,
) -> bool:
    world = len(sizes)
    divided, kept = (partial(optimizer, lr=rate, **more or {}) for rate in (lr / world, lr))
    mine = trained(divided, sizes, seed, factor=world, max_norm=max_norm)
    return near(mine, trained(kept, sizes, seed, max_norm=max_norm, ranks=False), 1e-7)


@attack(
    "a_quarter_of_the_rate_on_four_processes_is_too_small",
    draw=summed_under_sgd,
    outside=[{"sizes": [4, 4], "seed": 1, "lr": 0.05, "factor": 2.0}],
)
def a_divided_rate_is_too_small_for_an_average(
    sizes: list[int], seed: int, lr: float, factor: float = 1.0
) -> bool:
    first = partial(trained, sizes=sizes, seed=seed, steps=1)
    mine = first(partial(SGD, lr=lr / len(sizes)), factor=factor)
    return near(mine, first(partial(SGD, lr=lr), ranks=False) / len(sizes), 1e-7)


def a_factor(draw: Draw) -> dict[str, Any]:
    given = summed_under_sgd(draw)
    decay = draw.choice([0.0, 0.1])
    adam = partial(torch.optim.AdamW, weight_decay=decay) if decay else ADAM
    return given | {"factor": 10 ** draw.uniform(-2, 2), "optimizer": partial(adam, eps=1e-14)}


@attack(
    "adam_hides_a_constant_factor",
    "adam_does_not_hide_everything",
    draw=a_factor,
    outside=[
        {"sizes": [4, 4], "seed": 1, "lr": 0.05, "factor": 4.0, "optimizer": SGD},
        {
            "sizes": [4, 4],
            "seed": 1,
            "lr": 0.05,
            "factor": 4.0,
            "optimizer": partial(ADAM, weight_decay=0.5),
        },
        {"sizes": [1, 6], "seed": 1, "lr": 0.05, "factor": 1.0, "optimizer": ADAM},
    ],
)
def adam_cancels_a_factor(
    sizes: list[int], seed: int, lr: float, factor: float, optimizer: Any
) -> bool:
    made = partial(optimizer, lr=lr)
    mine = trained(made, sizes, seed, factor=factor)
    return near(mine, trained(made, sizes, seed, ranks=False), 1e-6)


# --- learning rates, on one weight


def way(
    optimizer: Callable[..., torch.optim.Optimizer], steps: int, slope: Callable[[Tensor], Tensor]
) -> float:
    weight = nn.Parameter(torch.ones((), dtype=torch.double))
    made = optimizer([weight])
    for _ in range(steps):
        weight.grad = slope(weight.detach())
        made.step()
    return 1 - float(weight.detach())


def scaled(draw: Draw) -> dict[str, Any]:
    return {
        "k": draw.randint(2, 16),
        "steps": draw.randint(1, 50),
        "lr": 10 ** draw.uniform(-5, -2),
        "size": 10 ** draw.uniform(-2, 2),
    }


@attack(
    "linear_scaling_reaches_the_same_weight",
    "more_processes_make_no_larger_updates",
    draw=scaled,
    outside=[{"k": 4, "steps": 4, "lr": 1e-3, "size": 1.0, "momentum": 0.9}],
)
def linear_scaling_goes_as_far(
    k: int, steps: int, lr: float, size: float, momentum: float = 0.0
) -> bool:
    def slope(weight: Tensor) -> Tensor:
        return torch.full_like(weight, size)

    small = way(partial(SGD, lr=lr, momentum=momentum), k * steps, slope)
    large = way(partial(SGD, lr=k * lr, momentum=momentum), steps, slope)
    same_update = way(partial(SGD, lr=lr), 1, slope)
    unchanged = math.isclose(same_update, lr * size, rel_tol=1e-9)
    return unchanged and math.isclose(small, large, rel_tol=1e-9)


@attack(
    "linear_scaling_reaches_the_same_weight",
    draw=lambda draw: {"steps": draw.randint(1000, 2000), "momentum": draw.uniform(0, 0.9)},
    outside=[{"steps": 4, "momentum": 0.9}],
)
def long_training_with_momentum(steps: int, momentum: float) -> bool:
    def far(lr: float, steps: int) -> float:
        moved = velocity = 0.0
        for _ in range(steps):
            velocity = momentum * velocity + 1
            moved += lr * velocity
        return moved

    return math.isclose(far(1e-6, 4 * steps), far(4e-6, steps), rel_tol=0.01)


@attack(
    "linear_scaling_is_approximate_where_the_gradient_changes",
    draw=lambda draw: {"k": draw.randint(2, 8), "lr": 10 ** draw.uniform(-6, -3.5)},
    outside=[{"k": 4, "lr": 0.1}, {"k": 4, "lr": 0.6}],
)
def linear_scaling_where_the_gradient_is_the_weight(k: int, lr: float) -> bool:
    small = way(partial(SGD, lr=lr), 16 * k, torch.clone)
    large = way(partial(SGD, lr=k * lr), 16, torch.clone)
    return math.isclose(1 - small, 1 - large, rel_tol=0.01)


@attack(
    "adams_step_is_not_always_as_long_as_the_learning_rate",
    "linear_scaling_with_adam",
    draw=scaled,
    outside=[{"k": 4, "steps": 4, "lr": 1e-3, "size": 1.0, "flips": True}],
)
def adams_step_is_the_rate(k: int, steps: int, lr: float, size: float, flips: bool = False) -> bool:
    signs = iter([1.0, -1.0] * 10_000 if flips else [1.0] * 10_000)

    def slope(weight: Tensor) -> Tensor:
        return torch.full_like(weight, size * next(signs))

    adam = partial(ADAM, eps=0.0)
    small, large = (
        way(partial(adam, lr=lr), k * steps, slope),
        way(partial(adam, lr=k * lr), steps, slope),
    )
    straight = math.isclose(small, k * steps * lr, rel_tol=1e-9)
    return straight and math.isclose(small, large, rel_tol=1e-9)


def noisy(draw: Draw) -> dict[str, Any]:
    return {"k": draw.choice([2, 4, 9, 16]), "seed": draw.randrange(10**6)}


@attack(
    "square_root_scaling_keeps_the_variance_of_a_step",
    "more_epochs_are_needed_unless_the_rate_grows_as_much",
    draw=noisy,
    outside=[{"k": 4, "seed": 1, "power": 1.0}, {"k": 4, "seed": 1, "power": 0.0}],
)
def the_root_keeps_the_variance(k: int, seed: int, power: float = 0.5) -> bool:
    """The update is rate x mean of a batch: its variance, and the epochs for the same way."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randn(4000, 4, generator=generator, dtype=torch.double).mean(1)
    large = torch.randn(4000, 4 * k, generator=generator, dtype=torch.double).mean(1) * k**power
    epochs = 1 / (k**power / k)  # steps x rate is the way
    same = math.isclose(float(large.var() / small.var()), 1, rel_tol=0.2)
    return same and math.isclose(epochs, k**0.5)


# --- samplers


def read(examples: int, ranks: int, batch: int, **drops: bool) -> list[list[list[int]]]:
    """For each rank the numbers that it reads, by step."""
    numbers: Any = list(range(examples))
    found = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(
            numbers, ranks, rank, drop_last=drops.get("sampler_drops", False)
        )
        loader: Any = DataLoader(
            numbers, batch, sampler=sampler, drop_last=drops.get("loader_drops", False)
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
    ],
)
def every_example_is_read_once(
    ranks: int, batch: int, examples: int, loader_drops: bool = False
) -> bool:
    numbers = flat(read(examples, ranks, batch, loader_drops=loader_drops))
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
    outside=[],
)
def steps_and_drops_are_those_of_the_formulas(
    ranks: int, batch: int, examples: int, sampler_drops: bool, loader_drops: bool
) -> bool:
    found = read(examples, ranks, batch, sampler_drops=sampler_drops, loader_drops=loader_drops)
    each = examples // ranks if sampler_drops else math.ceil(examples / ranks)
    steps = each // batch if loader_drops else math.ceil(each / batch)
    numbers = list(flat(found))
    never = examples - len(set(numbers))
    most = (ranks - 1 if sampler_drops else 0) + ((batch - 1) * ranks if loader_drops else 0)
    return {len(rank) for rank in found} == {steps} and never <= most


@attack(
    "ddp_does_not_share_out_the_data",
    "a_sampler_shuffles_anew_with_set_epoch",
    draw=divisible,
    outside=[{"ranks": 2, "batch": 2, "examples": 40, "set_epoch": True}],
)
def without_set_epoch_all_epochs_are_alike(
    ranks: int, batch: int, examples: int, set_epoch: bool = False
) -> bool:
    numbers: Any = list(range(examples))
    sampler: Any = DistributedSampler(numbers, ranks, 0)
    orders = []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    without = [next(iter(DataLoader(numbers, examples))).tolist() for _ in range(ranks)]
    return orders[0] == orders[1] and without == [numbers] * ranks


# --- uneven inputs and devices


def uneven(draw: Draw) -> dict[str, Any]:
    batch = draw.randint(1, 4)
    counts = [draw.randint(0, 4) for _ in range(draw.randint(2, 6))]
    return {"counts": [*counts, 4], "batch": batch, "seed": draw.randrange(10**6)}


@attack(
    "under_join_a_step_is_the_big_batch_of_what_is_left",
    "under_join_every_example_weighs_the_same",
    draw=uneven,
    outside=[{"counts": [1, 4], "batch": 2, "seed": 1, "last": 1}],
)
def join_is_an_average_of_what_is_left(
    counts: list[int], batch: int, seed: int, last: int = 0
) -> bool:
    """Processes with so many batches. ``last``: the examples in the last batch of the first one."""
    for step in range(max(counts)):
        left = [rank for rank, count in enumerate(counts) if count > step]
        sizes = [last if last and rank == 0 and step == counts[0] - 1 else batch for rank in left]
        added = torch.stack(gradient(sizes, seed + step, "mse")).sum(0)
        big = whole(sizes, seed + step, "mse")
        by_example = whole(sizes, seed + step, "mse", "sum") / (len(counts) * batch)
        if not near(added / len(left), big) or not near(added / len(counts), by_example):
            return False
    return True


@attack(
    "the_local_rank_is_not_always_a_remainder",
    "one_process_gives_ddp_one_device",
    draw=lambda draw: {"nodes": [draw.randint(1, 8)] * draw.randint(1, 6)},
    outside=[{"nodes": [1, 3]}, {"nodes": [2, 2], "round_robin": True}],
)
def the_local_rank_is_a_remainder(nodes: list[int], round_robin: bool = False) -> bool:
    places = [(node, local) for node, gpus in enumerate(nodes) for local in range(gpus)]
    if round_robin:
        places.sort(key=lambda place: place[1])
    return all(local == rank % max(nodes) for rank, (_, local) in enumerate(places))


def cases() -> list[Any]:
    return [pytest.param(one, id=one.holds.__name__) for one in ATTACKS]


@pytest.mark.parametrize("one", cases())
def test_the_condition_holds_in_random_set_ups(one: Attack) -> None:
    seed = random.randrange(10**9)
    draw = Draw(seed)
    for _ in range(SETUPS):
        setup = one.draw(draw)
        assert one.holds(**setup), (seed, setup)


@pytest.mark.parametrize("one", cases())
def test_the_check_fails_outside_the_condition(one: Attack) -> None:
    for setup in one.outside:
        assert not one.holds(**setup), setup


def test_every_claim_is_attacked_or_says_why_not() -> None:
    attacked = {claim for one in ATTACKS for claim in one.claims}
    assert not attacked & set(NOT_ATTACKED)
    assert attacked | set(NOT_ATTACKED) == {claim.name for claim in page.claims()}
