"""Gradients of parts of a batch, in one process: averages, sums, counts of tokens, accumulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.claims.attacks.attack import Draw, attack, near

FEATURES, OUTPUTS = 4, 3


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


def a_batch_on_gpus(draw: Draw) -> dict[str, Any]:
    given = equal_sizes(draw)
    gpus = len(given["sizes"])
    return {
        "batch": sum(given["sizes"]),
        "gpus": gpus,
        "seed": given["seed"],
        "loss": given["loss"],
    }


@attack(
    "the_sum_is_too_large_only_for_added_losses",
    draw=a_batch_on_gpus,
    outside=[
        {"batch": 6, "gpus": 4, "seed": 1, "loss": "mse"},
        {"batch": 16, "gpus": 3, "seed": 1, "loss": "mse"},
    ],
)
def added_means_are_as_many_times_too_large(batch: int, gpus: int, seed: int, loss: str) -> bool:
    sizes = [len(part) for part in torch.arange(batch).chunk(gpus)]  # as DataParallel cuts it
    added = torch.stack(gradient(sizes, seed, loss)).sum(0)
    return near(added, gpus * whole(sizes, seed, loss))


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
    return the_average_of_means_is_the_big_batch.holds(sizes, seed, "ce")


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
    outside=[
        {"ranks": 2, "steps": 2, "seed": 1, "adds_up_to": 2.0},
        {"ranks": 2, "steps": 2, "seed": 1, "of_own": 0.5},
    ],
)
def without_no_sync(
    ranks: int, steps: int, seed: int, adds_up_to: float = 1.0, of_own: float = 0.0
) -> bool:
    """Every backward reduces what has accumulated; with no_sync only the last one does.

    The reduction is a weighted sum. ``adds_up_to``: of its weights. ``of_own``: how much of its own
    gradient each rank keeps, beside the sum.
    """
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(steps, ranks, 7, generator=generator, dtype=torch.double)
    weights = torch.rand(ranks, 1, generator=generator, dtype=torch.double)
    weights *= adds_up_to / weights.sum()

    def reduced(gradients: Tensor) -> Tensor:
        return of_own * gradients + (1 - of_own) * (weights * gradients).sum(0)

    held = torch.zeros(ranks, 7, dtype=torch.double)
    for micro_batch in own:
        held = reduced(held + micro_batch)
    return near(held, reduced(own.sum(0)))
