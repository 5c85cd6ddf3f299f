"""Sum or average: what DataParallel and DistributedDataParallel do with gradients.

nn.DataParallel needs at least two GPUs; with fewer it only calls the module. Here it is emulated on
the CPU: it scatters the batch, runs a replica of the module on each part, gathers the outputs, and
adds up the replicas' gradients. DistributedDataParallel (DDP) is torch's own, on real processes.
`g` is the gradient of one batch of 16 in one process without any wrapper.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_equivalence import Rank
from ddp_equivalence.commands.explain.verification import LossInside
from ddp_equivalence.ranks.warm_ranks import on_ranks
from ddp_equivalence.strategies.emulated_data_parallel import EmulatedDataParallel
from tests.claims.claim import Change, Table, claim
from tests.claims.ddp import ddp_gradient, wrapped
from tests.claims.setting import (
    big_batch_gradient,
    equal,
    flat_gradient,
    model_and_batch,
    mse,
    times,
)


def data_parallel_gradient(gpus: int, divide_by: int = 1) -> tuple[Tensor, Tensor]:
    """One loss over gathered outputs: the model's gradient, and the sum of the replicas'.

    ``divide_by``: what the model's gradient is divided by; DataParallel divides by nothing.
    """
    model, rows, targets = model_and_batch()
    parallel = EmulatedDataParallel(model, gpus)
    mse(parallel, rows, targets).backward()
    of_replicas = [flat(weights) for weights in parallel.weights_by_replica]
    return flat_gradient(model) / divide_by, torch.stack(of_replicas).sum(0)


def flat(weights: dict[str, Tensor]) -> Tensor:
    """The gradients of one replica's weights in one row."""
    gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients])


def loss_inside_gradient(gpus: int, reduction: str) -> Tensor:
    """Every replica returns its own mean loss; the caller adds up or averages these losses."""
    model, rows, targets = model_and_batch()
    losses = EmulatedDataParallel(LossInside(model, nn.functional.mse_loss), gpus)(rows, targets)
    getattr(losses, reduction)().backward()
    return flat_gradient(model)


@claim(
    "true",
    divides=True,
    fails_when=Change("DDP adds up gradients like DataParallel and does not divide", divides=False),
)
def test_data_parallel_adds_up_and_ddp_averages(table: Table, divides: bool) -> None:
    """DataParallel sums the gradients of its GPUs, DDP averages them over its processes.

    Each rule fits its own losses. Take 16 examples on 4 GPUs. DataParallel has one mean over 16,
    whose parts are added up; under DDP each process has a mean over its own 4, and means are
    averaged. Both give the same gradient. DDP divides by the number of processes and by nothing
    else.

    DataParallel has one loss over all 16 outputs. The part of each GPU is already divided by 16, so
    the parts only have to be added up. Under DDP every process takes the mean over its own 4
    examples, which is as large as the mean over all. DDP adds up these gradients and divides by the
    number of processes. Each rule fits its own losses, and both give the same gradient. DDP divides
    by nothing but the number of processes: it knows neither the loss nor the batch size.
    """
    expected = big_batch_gradient()
    gradient, parts = data_parallel_gradient(4)
    assert equal(gradient, parts)
    assert equal(parts, expected)
    table.add_row(
        set_up="DataParallel (emulated), 4 GPUs, batch 16",
        gradients_of_the_parts_added_up=times(parts, expected),
        gradient_on_the_model=times(gradient, expected),
    )
    ranks = on_ranks("2x2", ddp_gradient, (4, 4, 4, 4), mse, divides)
    added_up = torch.stack([rank.own for rank in ranks]).sum(0)
    assert equal(added_up, 4 * expected)
    for rank in ranks:
        assert equal(rank.gradient, added_up / 4)
    table.add_row(
        set_up="DDP, 4 processes, batch 4 each",
        gradients_of_the_parts_added_up=times(added_up, expected),
        gradient_on_the_model=times(ranks[0].gradient, expected),
    )


@claim(
    "false",
    divide_by=1,
    fails_when=Change("DataParallel also divides, by the number of its GPUs", divide_by=4),
)
def test_the_average_is_no_smaller_than_the_sum(table: Table, divide_by: int) -> None:
    """DDP averages where DataParallel sums, so on 4 GPUs DDP's gradient is 4 times smaller.

    It is the same gradient: DataParallel adds up parts of one loss, and DDP averages whole means.
    To move from DataParallel to DDP, divide the batch size by the number of processes, and change
    neither loss nor learning rate. All processes must have equally many examples.

    They are the same gradient, that of one batch of 16, because they combine different things:
    DataParallel adds up parts of one loss over 16 examples, and DDP averages whole means over 4. To
    train the same after moving from DataParallel to DDP, give each process the batch size divided
    by the number of processes, and change neither loss nor learning rate. This holds for a loss
    that is a mean over examples, with equally many examples in every process.
    """
    expected = big_batch_gradient()
    table.add_row(set_up="one process, no wrapper, batch 16", gradient="g")
    for gpus in (2, 4):
        gradient, _ = data_parallel_gradient(gpus, divide_by)
        assert equal(gradient, expected)
        table.add_row(
            set_up=f"DataParallel (emulated), {gpus} GPUs, batch 16",
            gradient=times(gradient, expected),
        )
    for layout, sizes in (("1x2", (8, 8)), ("1x4", (4, 4, 4, 4)), ("2x2", (4, 4, 4, 4))):
        for rank in on_ranks(layout, ddp_gradient, sizes, mse):
            assert equal(rank.gradient, expected)
        nodes = "2 machines x 2" if layout == "2x2" else str(len(sizes))
        table.add_row(
            set_up=f"DDP, {nodes} processes, batch {sizes[0]} each",
            gradient=times(rank.gradient, expected),
        )


@claim(
    "true when every replica returns a mean of its own, these are added up, and the batch is a "
    "multiple of 4",
    added="sum",
    fails_when=Change("the losses are averaged", added="mean"),
)
def test_the_sum_is_too_large_only_for_added_losses(table: Table, added: str) -> None:
    """DataParallel sums, so with 4 GPUs its gradient is 4 times too large.

    The usual loop has one loss over the gathered outputs, and a right gradient. Where replicas
    return their means and these are added up, it is as many times too large as there are equal
    parts: 6 examples on 4 GPUs are 3 parts of 2. The mean of the means is right if all parts are
    equally large; 16 on 3 GPUs are 6, 6 and 4.

    Not in the usual loop, `loss_fn(model(x), y)`, which has one loss over the gathered outputs. If
    the module returns its loss, DataParallel gathers one mean per GPU. With `losses.sum()` the
    gradient is then 4 times too large. With `losses.mean()` it is right again if all parts are
    equally large. On 5 GPUs a batch of 16 is split into four parts of 4, and the fifth GPU gets
    none. On 3 GPUs a batch of 16 is split into 6, 6 and 4, and in the mean of the three
    means the 4 weigh more than they do in the batch. One loss over the gathered outputs is right
    for any split.
    """
    expected = big_batch_gradient()
    whole, _ = data_parallel_gradient(4)
    assert equal(whole, expected)
    inside, right = "inside the module", "one over the gathered outputs"
    table.add_row(GPUs=4, loss=right, gradient=times(whole, expected))
    for gpus in (4, 5):
        summed = loss_inside_gradient(gpus, added)
        assert equal(summed, 4 * expected)
        table.add_row(GPUs=gpus, loss=f"{inside}, `.sum()`", gradient=times(summed, expected))
    averaged = loss_inside_gradient(4, "mean")
    assert equal(averaged, expected)
    table.add_row(GPUs=4, loss=f"{inside}, `.mean()`", gradient=times(averaged, expected))
    uneven = loss_inside_gradient(3, "mean")
    assert not torch.allclose(uneven, expected, rtol=1e-3)
    table.add_row(GPUs=3, loss=f"{inside}, `.mean()`", gradient=times(uneven, expected))
    whole, _ = data_parallel_gradient(3)
    assert equal(whole, expected)
    table.add_row(GPUs=3, loss=right, gradient=times(whole, expected))


def of_the_same_examples(rank: Rank, divides: bool) -> Tensor:
    """The gradient after DDP if every process takes the first four examples."""
    model, rows, targets = model_and_batch()
    ddp = wrapped(model, divides)
    mse(ddp, rows[:4], targets[:4]).backward()
    gradient = flat_gradient(model)
    del ddp
    return gradient


@claim(
    "false",
    divides=True,
    fails_when=Change("DDP adds up gradients and does not divide", divides=False),
)
def test_the_gradient_does_not_grow_with_the_processes(table: Table, divides: bool) -> None:
    """DDP effectively sums: with N GPUs the effective learning rate is N times as large.

    If all processes take the same four examples, the gradient is theirs, on 1, 2 and 4 processes
    alike. What grows with the processes is the effective batch, if each keeps its batch size.
    """
    model, rows, targets = model_and_batch()
    mse(model, rows[:4], targets[:4]).backward()
    expected = flat_gradient(model)
    for processes, layout in ((1, "1x1"), (2, "1x2"), (4, "2x2")):
        gradient = on_ranks(layout, of_the_same_examples, divides)[0]
        assert equal(gradient, expected)
        table.add_row(
            processes=processes,
            examples_of_each="the same four",
            gradient=f"{times(gradient, expected)} of these four",
        )


@claim(
    "false",
    divides=False,
    fails_when=Change("the hook averages, as DDP does", divides=True),
)
def test_a_communication_hook_adds_up(table: Table, divides: bool) -> None:
    """DDP averages, and this behaviour is not configurable.

    `register_comm_hook` replaces the reduction: with a hook that all-reduces and does not divide,
    the gradient of four local means is 4 g. Sums then add up to the big batch's sum without a
    factor.
    """
    expected = big_batch_gradient()
    for name, how in (("none", True), ("one that adds up", divides)):
        gradient = on_ranks("2x2", ddp_gradient, (4, 4, 4, 4), mse, how)[0].gradient
        assert equal(gradient, expected * (1 if name == "none" else 4))
        table.add_row(
            hook=name, processes=4, losses="means over 4", gradient=times(gradient, expected)
        )
