"""Sum-reduced losses, and when to multiply by the world size.

This is real DDP on 4 processes, on 2 machines with 2 each. `g` is the gradient of all 16 examples
in one process with the same reduction, "sum" or "mean".
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ddp_equivalence.ranks.warm_ranks import on_ranks
from tests.claims.claim import Change, Table, claim
from tests.claims.ddp import ddp_gradient
from tests.claims.setting import equal, flat_gradient, model_and_batch, times

EQUAL = (4, 4, 4, 4)


def scaled(
    model: nn.Module, rows: Tensor, targets: Tensor, reduction: str, factor: float
) -> Tensor:
    return factor * nn.functional.mse_loss(model(rows), targets, reduction=reduction)


def big_batch(reduction: str) -> Tensor:
    model, rows, targets = model_and_batch()
    nn.functional.mse_loss(model(rows), targets, reduction=reduction).backward()
    return flat_gradient(model)


def ddp_result(sizes: tuple[int, ...], reduction: str, factor: float, divides: bool) -> Tensor:
    """The gradient that is on every rank."""
    loss = partial(scaled, reduction=reduction, factor=factor)
    ranks = on_ranks("2x2", ddp_gradient, sizes, loss, divides)
    for rank in ranks:
        assert torch.equal(rank.gradient, ranks[0].gradient)
    gradient: Tensor = ranks[0].gradient
    return gradient


@claim(
    "true",
    divides=True,
    fails_when=Change("DDP does not divide by the world size", divides=False),
)
def test_a_sum_times_the_world_size_is_the_big_batch(table: Table, divides: bool) -> None:
    """With a sum-reduced loss, multiply it by the world size to cancel DDP's averaging.

    The sums add up to the sum over all, and DDP divides that by the number of processes: the world
    size, not the GPUs of a machine. This is right for uneven shards, too.

    The sums of the processes add up to the sum over all examples, but DDP divides by the number of
    processes: without the factor the gradient is g / 4. The factor is the number of all processes
    (the world size), not the number of GPUs of one machine. It is also right if the processes have
    different numbers of examples, because a sum does not divide by a count. The gradient of a sum
    grows with the effective batch, as it does on one device.
    """
    expected = big_batch("sum")
    for sizes, factor, multiple in (
        (EQUAL, 1.0, 0.25),
        (EQUAL, 2.0, 0.5),
        (EQUAL, 4.0, 1.0),
        ((7, 5, 3, 1), 4.0, 1.0),
    ):
        gradient = ddp_result(sizes, "sum", factor, divides)
        assert equal(gradient, multiple * expected)
        table.add_row(
            batch_sizes_of_the_processes=", ".join(map(str, sizes)),
            loss=f"sum, times {factor:.0f}",
            gradient=times(gradient, expected),
        )


@claim(
    "true when the loss is a sum over examples",
    divides=True,
    fails_when=Change("DDP does not divide by the world size", divides=False),
)
def test_only_a_sum_is_multiplied_by_the_world_size(table: Table, divides: bool) -> None:
    """DDP divides by the world size, so the loss has to be multiplied by it.

    A mean, the default of torch's losses, needs no factor. Times 4 it gives 4 g: with plain SGD, a
    learning rate that is 4 times too large.

    A mean, the default of torch's losses, needs no factor: the average of the processes' means is
    the mean over all, if they have equally many examples. Multiplied by the world size it gives
    4 g, which for plain SGD is the same as a learning rate that is 4 times too large. A sum does
    need the factor.
    """
    for reduction, factor, multiple in (
        ("sum", 1.0, 0.25),
        ("sum", 4.0, 1.0),
        ("mean", 1.0, 1.0),
        ("mean", 4.0, 4.0),
    ):
        expected = big_batch(reduction)
        gradient = ddp_result(EQUAL, reduction, factor, divides)
        assert equal(gradient, multiple * expected)
        table.add_row(
            reduction=reduction, loss_times=f"{factor:.0f}", gradient=times(gradient, expected)
        )
