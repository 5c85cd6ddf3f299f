"""Sum or average: what DataParallel and DistributedDataParallel do with gradients.

nn.DataParallel needs two GPUs; on fewer it just calls the module. Here its rule is emulated on the
CPU: scatter the batch, run a copy of the module on each chunk, gather the outputs, add the copies'
gradients. DistributedDataParallel (DDP) is torch's own, on real processes. `g` is the gradient of
one batch of 16 in one process without any wrapper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.ranks.on_ranks import on_ranks
from tests.claims.claim import Evidence, Opposite, claim
from tests.claims.data_parallel import DataParallelRule, LossInside
from tests.claims.ddp import ddp_gradient
from tests.claims.setting import (
    big_batch_gradient,
    equal,
    flat_gradient,
    model_and_batch,
    mse,
    times,
)


def data_parallel_gradient(gpus: int, divide_by: int = 1) -> tuple[Tensor, Tensor]:
    """One loss over gathered outputs: the gradient left, and the sum of the copies' gradients."""
    model, rows, targets = model_and_batch()
    parallel = DataParallelRule(model, gpus, divide_by)
    mse(parallel, rows, targets).backward()
    return flat_gradient(model), torch.stack(parallel.gradients_of_copies()).sum(0) * divide_by


def loss_inside_gradient(gpus: int, reduction: str) -> Tensor:
    """Every copy returns its own mean loss; the caller adds or averages the row of losses."""
    model, rows, targets = model_and_batch()
    losses = DataParallelRule(LossInside(model), gpus)(rows, targets)
    getattr(losses, reduction)().backward()
    return flat_gradient(model)


@claim(
    "true",
    divides=True,
    opposite=Opposite("DDP adds up like DataParallel, and never divides", divides=False),
)
def test_data_parallel_adds_up_and_ddp_averages(evidence: Evidence, divides: bool) -> None:
    """DataParallel sums the gradients of its GPUs, DDP averages them over its processes.

    DataParallel has one loss over all 16 outputs, so that each GPU's part is already divided by
    16; the parts only have to be added. In DDP every process takes the mean over its own 4
    examples, which is as large as the mean over all; DDP adds these gradients and divides by the
    number of processes. Each rule is right for what it is given, and both end at the same gradient.
    The number of processes is all that DDP divides by: it knows neither loss nor batch size.
    """
    expected = big_batch_gradient()
    gradient, parts = data_parallel_gradient(4)
    assert equal(gradient, parts)
    assert equal(parts, expected)
    evidence(
        set_up="DataParallel (emulated), 4 GPUs, batch 16",
        gradients_of_the_parts_added_up=times(parts, expected),
        what_is_left=times(gradient, expected),
    )
    ranks = on_ranks("2x2", ddp_gradient, (4, 4, 4, 4), mse, divides)
    added_up = torch.stack([rank.own for rank in ranks]).sum(0)
    assert equal(added_up, 4 * expected)
    for rank in ranks:
        assert equal(rank.gradient, added_up / 4)
    evidence(
        set_up="DDP, 4 processes, batch 4 each",
        gradients_of_the_parts_added_up=times(added_up, expected),
        what_is_left=times(ranks[0].gradient, expected),
    )


@claim(
    "false",
    divide_by=1,
    opposite=Opposite("DataParallel divides by the number of its GPUs, too", divide_by=4),
)
def test_the_average_is_no_smaller_than_the_sum(evidence: Evidence, divide_by: int) -> None:
    """DDP averages where DataParallel sums, so on 4 GPUs DDP's gradient is 4 times smaller.

    They are the same gradient: that of one batch of 16. What is summed is not what is averaged.
    DataParallel sums shares of one loss over 16 examples, DDP averages whole means over 4. To train
    the same after going from DataParallel to DDP, give every process the batch size over the number
    of processes, and leave loss and learning rate alone. This holds for a loss that is a mean
    over examples, and equally many examples in every process.
    """
    expected = big_batch_gradient()
    evidence(set_up="one process, no wrapper, batch 16", gradient="g")
    for gpus in (2, 4):
        gradient, _ = data_parallel_gradient(gpus, divide_by)
        assert equal(gradient, expected)
        evidence(
            set_up=f"DataParallel (emulated), {gpus} GPUs, batch 16",
            gradient=times(gradient, expected),
        )
    for layout, sizes in (("1x2", (8, 8)), ("1x4", (4, 4, 4, 4)), ("2x2", (4, 4, 4, 4))):
        for rank in on_ranks(layout, ddp_gradient, sizes, mse):
            assert equal(rank.gradient, expected)
        nodes = "2 machines x 2" if layout == "2x2" else str(len(sizes))
        evidence(
            set_up=f"DDP, {nodes} processes, batch {sizes[0]} each",
            gradient=times(rank.gradient, expected),
        )


@claim(
    "true when every replica returns a loss of its own and these are added up",
    added="sum",
    opposite=Opposite("the losses are averaged", added="mean"),
)
def test_the_sum_is_too_large_only_for_added_losses(evidence: Evidence, added: str) -> None:
    """DataParallel sums, so with 4 GPUs its gradient is 4 times too large.

    Not in the usual loop, `loss_fn(model(x), y)`: one loss over the gathered outputs. If the
    module returns its loss, DataParallel gathers one mean per GPU. With `losses.sum()` the gradient
    is 4 times too large; with `losses.mean()` it is right again, if all chunks are equal. On 3
    GPUs a batch of 16 is cut into 6, 6 and 4, and the mean of means gives the 4 more weight than
    they have in the batch. One loss over gathered outputs is right for any cut.
    """
    expected = big_batch_gradient()
    whole, _ = data_parallel_gradient(4)
    assert equal(whole, expected)
    inside, right = "inside the module", "one over the gathered outputs"
    evidence(GPUs=4, loss=right, gradient=times(whole, expected))
    summed = loss_inside_gradient(4, added)
    assert equal(summed, 4 * expected)
    evidence(GPUs=4, loss=f"{inside}, `.sum()`", gradient=times(summed, expected))
    averaged = loss_inside_gradient(4, "mean")
    assert equal(averaged, expected)
    evidence(GPUs=4, loss=f"{inside}, `.mean()`", gradient=times(averaged, expected))
    uneven = loss_inside_gradient(3, "mean")
    assert not torch.allclose(uneven, expected, rtol=1e-3)
    evidence(GPUs=3, loss=f"{inside}, `.mean()`", gradient=times(uneven, expected))
    whole, _ = data_parallel_gradient(3)
    assert equal(whole, expected)
    evidence(GPUs=3, loss=right, gradient=times(whole, expected))
