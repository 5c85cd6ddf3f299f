"""Random set-ups attack the condition of each claim, and counter-examples break it.

An attack shares no code with the claim's test. Where DDP itself is in question it runs on real
ranks; elsewhere ranks are simulated in one process with autograd, and samplers are torch's own. A
counter-example lies outside the condition, and there the same check must fail. Claims without a
number to vary are listed with the reason.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_equivalence import Rank
from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims import page

FEW, MANY = 40, 200
"""How many set-ups attack a condition in every run, and in a thorough one."""

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
    "test_one_process_gives_ddp_one_device": "torch refuses it before it looks at numbers",
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


def gradients_of(model: nn.Module) -> Tensor:
    """All gradients in one row."""
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


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
    "sum_inside_and_average_between_is_the_big_batch",
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
    draw=lambda draw: any_sizes(draw) | {"reduction": "sum"},
    outside=[{"sizes": [4, 4], "seed": 1, "loss": "mse", "reduction": "mean"}],
)
def an_averaged_loss_times_the_world_size(
    sizes: list[int], seed: int, loss: str, reduction: str
) -> bool:
    average = torch.stack(gradient(sizes, seed, loss, reduction)).mean(0)
    return near(len(sizes) * average, whole(sizes, seed, loss, reduction))


# --- DDP itself, on real ranks


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


# --- one process


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
    factor: float | Tensor = 1.0,
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
            average = torch.stack([one[number] for one in parts]).mean(0)
            by_output = torch.as_tensor(factor).reshape(-1, *[1] * (average.ndim - 1))
            parameter.grad = by_output * average
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
    "clipping_is_that_of_the_big_batch",
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


def two_ranks(draw: Draw) -> dict[str, Any]:
    return {"optimizer": any_optimizer(draw), "seed": draw.randrange(10**6)}


@attack(
    "optimizers_with_a_state_train_like_the_big_batch",
    "ddp_keeps_ranks_alike_that_go_on_from_a_checkpoint",
    draw=two_ranks,
    outside=[
        {"optimizer": partial(SGD, lr=0.1, momentum=0.9), "seed": 1, "state_on": (0,)},
        {"optimizer": partial(ADAM, lr=0.1), "seed": 1, "state_on": (0,)},
        {"optimizer": partial(SGD, lr=0.1), "seed": 1, "weights_on": (0,)},
    ],
)
def two_ranks_stay_alike_after_a_checkpoint(
    optimizer: Any,
    seed: int,
    state_on: tuple[int, ...] = (0, 1),
    weights_on: tuple[int, ...] = (0, 1),
) -> bool:
    """Each rank has its own model and optimizer, loads a checkpoint, and takes averaged steps."""
    old = new_model(seed + 1)
    before = optimizer(old.parameters())
    loss_of(old(data(4, seed)[0]), data(4, seed)[1], "mse").backward()
    before.step()
    models = [new_model(seed) for _ in range(2)]
    optimizers = [optimizer(model.parameters()) for model in models]
    for rank in weights_on:
        models[rank].load_state_dict(old.state_dict())
    for rank in state_on:
        optimizers[rank].load_state_dict(deepcopy(before.state_dict()))  # as from a file
    for step in range(3):
        rows, targets = data(4, seed + step)
        for rank, model in enumerate(models):
            part = slice(2 * rank, 2 * rank + 2)
            model.zero_grad()
            loss_of(model(rows[part]), targets[part], "mse").backward()
        for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert first.grad is not None
            assert second.grad is not None
            average = (first.grad + second.grad) / 2
            first.grad, second.grad = average.clone(), average.clone()
        for one in optimizers:
            one.step()
    ends = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    return torch.equal(*ends)


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
    factors = torch.tensor([10 ** draw.uniform(-2, 2) for _ in range(OUTPUTS)], dtype=torch.double)
    return given | {"factor": factors, "optimizer": partial(adam, eps=1e-14)}


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
    sizes: list[int], seed: int, lr: float, factor: Any, optimizer: Any
) -> bool:
    """``factor``: one number, or one for each output of the model."""
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
        "drift": draw.uniform(-1e-6, 1e-6),
    }


@attack(
    "linear_scaling_reaches_the_same_weight",
    draw=scaled,
    outside=[{"k": 4, "steps": 4, "lr": 1e-3, "size": 1.0, "momentum": 0.9}],
)
def linear_scaling_goes_as_far(
    k: int, steps: int, lr: float, size: float, drift: float = 0.0, momentum: float = 0.0
) -> bool:
    """``drift``: by how much of itself the gradient changes from one small step to the next."""
    small = way(partial(SGD, lr=lr, momentum=momentum), k * steps, drifting(size, drift))
    large = way(partial(SGD, lr=k * lr, momentum=momentum), steps, drifting(size, k * drift))
    return math.isclose(small, large, rel_tol=1e-3)


def drifting(size: float, drift: float) -> Callable[[Tensor], Tensor]:
    """A gradient that changes by this part of itself in every step."""
    steps = count()
    return lambda weight: torch.full_like(weight, size * (1 + drift) ** next(steps))


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
    outside=[{"k": 4, "steps": 50, "lr": 1e-3, "size": 1.0, "drift": -0.05}],
)
def adams_step_is_the_rate(k: int, steps: int, lr: float, size: float, drift: float = 0.0) -> bool:
    adam = partial(ADAM, eps=0.0)
    small = way(partial(adam, lr=lr), k * steps, drifting(size, drift))
    large = way(partial(adam, lr=k * lr), steps, drifting(size, k * drift))
    straight = math.isclose(small, k * steps * lr, rel_tol=1e-3)
    return straight and math.isclose(small, large, rel_tol=1e-3)


def noisy(draw: Draw) -> dict[str, Any]:
    return {"k": draw.choice([4, 9, 16]), "seed": draw.randrange(10**6)}


@attack(
    "square_root_scaling_keeps_the_variance_of_a_step",
    "more_epochs_are_needed_unless_the_rate_grows_as_much",
    draw=noisy,
    outside=[{"k": 4, "seed": 1, "power": 1.0}, {"k": 4, "seed": 1, "power": 0.0}],
)
def the_root_keeps_the_variance(k: int, seed: int, power: float = 0.5) -> bool:
    """The update is rate x mean of a batch: its variance, and the way of the root of k epochs."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randn(4000, 4, generator=generator, dtype=torch.double).mean(1)
    large = torch.randn(4000, 4 * k, generator=generator, dtype=torch.double).mean(1) * k**power
    same = math.isclose(float(large.var() / small.var()), 1, rel_tol=0.2)
    one_epoch = way(partial(SGD, lr=1e-4), 144, torch.ones_like)
    root = math.isqrt(k)
    epochs = way(partial(SGD, lr=1e-4 * k**power), root * 144 // k, torch.ones_like)
    return same and math.isclose(one_epoch, epochs, rel_tol=1e-6)


@attack(
    "more_processes_make_no_larger_updates",
    draw=noisy,
    outside=[{"k": 4, "seed": 1, "rate": 4.0}],
)
def a_larger_batch_at_the_same_rate(k: int, seed: int, rate: float = 1.0) -> bool:
    """The mean update is as long, and its deviation the root of k times smaller."""
    generator = torch.Generator().manual_seed(seed)
    small = 1 + torch.randn(8000, 4, generator=generator, dtype=torch.double).mean(1)
    large = 1 + torch.randn(8000, 4 * k, generator=generator, dtype=torch.double).mean(1)
    as_long = math.isclose(float(rate * large.mean() / small.mean()), 1, rel_tol=0.05)
    return as_long and math.isclose(float(small.std() / large.std()), k**0.5, rel_tol=0.1)


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


# --- devices


@attack(
    "the_local_rank_is_not_always_a_remainder",
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


@pytest.mark.parametrize("setups", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("one", cases())
def test_the_condition_holds_in_random_set_ups(one: Attack, setups: int) -> None:
    seed = random.randrange(10**9)
    draw = Draw(seed)
    for _ in range(setups):
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
