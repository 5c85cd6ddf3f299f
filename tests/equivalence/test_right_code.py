"""Right ways to train, under DDP or by hand, that look like known faults: none may be called one.

A check that calls right code wrong is switched off by its users, and then it finds nothing. The
docstring of each step says why the step is right.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.nn import functional as with_gradient
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank, assert_equivalent
from tests.equivalence.small_regression import Batch, Step, loss, name, regression


def micro_batches(shard: Batch) -> Iterator[Batch]:
    """The shard in micro-batches of two examples."""
    for rows, targets in zip(shard["rows"].split(2), shard["targets"].split(2), strict=True):
        yield {"rows": rows, "targets": targets}


def no_sync_around_backward_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The forward pass decides whether DDP reduces, and it runs outside of no_sync."""
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    with ddp.no_sync():
        value.backward()


def loss_over_gathered_outputs(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The backward of the gather sums over the ranks, and DDP divides by their number."""
    ddp = DistributedDataParallel(model)
    outputs = torch.cat(with_gradient.all_gather(ddp(shard["rows"])))
    targets = [torch.empty_like(shard["targets"]) for _ in range(rank.world_size)]
    dist.all_gather(targets, shard["targets"])
    F.mse_loss(outputs, torch.cat(targets)).backward()


def global_mean(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP's division by the world size cancels the factor; the count is that of all ranks."""
    ddp = DistributedDataParallel(model)
    elements = float(shard["targets"].numel())
    count = torch.tensor(elements, dtype=torch.float64, device=rank.device)
    dist.all_reduce(count)
    total = (ddp(shard["rows"]) - shard["targets"]).square().sum()
    (rank.world_size * total / count.item()).backward()


def bucket_views(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients that are views of DDP's buckets hold the same numbers."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    loss(ddp, shard).backward()


def tiny_buckets(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every parameter has a bucket of its own: more collectives, but the same sums."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    loss(ddp, shard).backward()


def huge_bucket(model: nn.Module, shard: Any, rank: Rank) -> None:
    """All parameters share one bucket: one collective, but the same sums."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=1024)
    loss(ddp, shard).backward()


def looks_for_unused(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP looks for unused parameters and finds none: this only costs time."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss(ddp, shard).backward()


def static_graph(model: nn.Module, shard: Any, rank: Rank) -> None:
    """In the first iteration of a static graph DDP reduces at the end of backward."""
    ddp = DistributedDataParallel(model, static_graph=True)
    loss(ddp, shard).backward()


def accumulated_under_no_sync(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Only the last micro-batch reduces; it reduces the sum of all micro-batches."""
    ddp = DistributedDataParallel(model)
    *first, last = micro_batches(shard)
    with ddp.no_sync():
        for micro_batch in first:
            (loss(ddp, micro_batch) / (len(first) + 1)).backward()
    (loss(ddp, last) / (len(first) + 1)).backward()


def accumulated_with_every_reduction(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every micro-batch reduces: an average that is averaged again stays the same."""
    ddp = DistributedDataParallel(model)
    window = list(micro_batches(shard))
    for micro_batch in window:
        (loss(ddp, micro_batch) / len(window)).backward()


def accumulated_and_divided_at_the_end(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The division may come after the reduction as well as before it."""
    ddp = DistributedDataParallel(model)
    *first, last = micro_batches(shard)
    with ddp.no_sync():
        for micro_batch in first:
            loss(ddp, micro_batch).backward()
    loss(ddp, last).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(first) + 1


def hook_of_torch(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook of torch divides and all-reduces, as DDP does without a hook."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    loss(ddp, shard).backward()


def hook_that_averages(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook replaces DDP's own division: it divides after the sum."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP checks its annotations
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / rank.world_size)

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    loss(ddp, shard).backward()


def loss_divided_and_hook_that_sums(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook does not divide, but the loss is already divided."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP checks its annotations
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    (loss(ddp, shard) / rank.world_size).backward()


def scaled_by_world_size_and_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss is multiplied by the world size, and the gradients are divided by it."""
    ddp = DistributedDataParallel(model)
    (rank.world_size * loss(ddp, shard)).backward()
    for parameter in model.parameters():
        parameter.grad.div_(rank.world_size)  # type: ignore[union-attr]


def scaled_and_unscaled(model: nn.Module, shard: Any, rank: Rank) -> None:
    """GradScaler scales the loss and unscales the gradients by the same factor on all ranks."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    scaler.scale(loss(ddp, shard)).backward()
    scaler.unscale_(optimizer)


def a_clip_that_does_not_bite(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradients lie below both clipping limits, so clipping changes nothing."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e3)
    nn.utils.clip_grad_value_(model.parameters(), clip_value=1e3)


def zeros_kept(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Backward adds to gradients of zero, which gives the same as starting from None."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    ddp.zero_grad(set_to_none=False)
    loss(ddp, shard).backward()


def evaluates_in_between(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Forward passes under no_grad, before and after the loss, leave no gradient."""
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        ddp(shard["rows"])
    value = loss(ddp, shard)
    with torch.no_grad():
        model(shard["rows"] + 1)
    value.backward()


def two_forward_passes_one_backward(model: nn.Module, shard: Any, rank: Rank) -> None:
    """One backward pass computes both halves, so DDP reduces complete gradients."""
    ddp = DistributedDataParallel(model)
    outputs = torch.cat([ddp(half) for half in shard["rows"].chunk(2)])
    F.mse_loss(outputs, shard["targets"]).backward()


def examples_in_another_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A mean does not depend on the order of its examples."""
    ddp = DistributedDataParallel(model)
    order = torch.arange(len(shard["rows"])).flip(0)
    loss(ddp, {name: values[order] for name, values in shard.items()}).backward()


def wrapped_copy(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor | None]:
    """The step trains a copy of the model and returns the gradients of the copy by name."""
    mine = copy.deepcopy(model)
    ddp = DistributedDataParallel(mine)
    loss(ddp, shard).backward()
    return {name: parameter.grad for name, parameter in mine.named_parameters()}


def cloned_by_name(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor | None]:
    """The step returns clones of the gradients, and then sets the model's own to zero."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    clones = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=False)
    return clones  # type: ignore[return-value]


UNDER_DDP: tuple[Step, ...] = (
    no_sync_around_backward_only,
    loss_over_gathered_outputs,
    global_mean,
    bucket_views,
    tiny_buckets,
    huge_bucket,
    looks_for_unused,
    static_graph,
    accumulated_under_no_sync,
    accumulated_with_every_reduction,
    accumulated_and_divided_at_the_end,
    hook_of_torch,
    hook_that_averages,
    loss_divided_and_hook_that_sums,
    scaled_by_world_size_and_back,
    scaled_and_unscaled,
    a_clip_that_does_not_bite,
    zeros_kept,
    evaluates_in_between,
    two_forward_passes_one_backward,
    examples_in_another_order,
    wrapped_copy,
    cloned_by_name,
)


# Gradients that are averaged by hand.


def averaged_in_reverse_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The order of the all-reduces is free, as long as it is the same on all ranks."""
    loss(model, shard).backward()
    for parameter in reversed(list(model.parameters())):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def averaged_by_the_backend(model: nn.Module, shard: Any, rank: Rank) -> None:
    """With ReduceOp.AVG the backend divides."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def averaged_as_one_buffer(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradients are one flat buffer, which is divided before the sum and copied back."""
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    buffer = torch.cat([gradient.flatten() for gradient in gradients]) / rank.world_size
    dist.all_reduce(buffer)
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def averaged_in_float64(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank gathers all gradients and takes their mean in a wider dtype."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        gathered = [torch.empty_like(parameter.grad) for _ in range(rank.world_size)]
        dist.all_gather(gathered, parameter.grad)
        parameter.grad = torch.stack(gathered).double().mean(0).to(parameter.dtype)


def averaged_around_a_ring(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum grows from rank to rank; the last rank sends the total round once more."""
    loss(model, shard).backward()
    here, last = rank.rank, rank.world_size - 1
    for parameter in model.parameters():
        assert parameter.grad is not None
        if here > 0:
            received = torch.empty_like(parameter.grad)
            dist.recv(received, src=here - 1)
            parameter.grad += received
        if here < last:
            dist.send(parameter.grad, dst=here + 1)
            dist.recv(parameter.grad, src=last if here == 0 else here - 1)
        if here + 1 != last:
            dist.send(parameter.grad, dst=0 if here == last else here + 1)
        parameter.grad /= rank.world_size


def averaged_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last rank receives the sum, divides it, and broadcasts the average."""
    loss(model, shard).backward()
    last = rank.world_size - 1
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.reduce(parameter.grad, dst=last)
        parameter.grad /= rank.world_size
        dist.broadcast(parameter.grad, src=last)


def scattered_and_gathered(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank sums one part of a buffer, which is padded to a multiple of the world size."""
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    buffer = F.pad(flat, (0, -len(flat) % rank.world_size))
    mine = buffer.new_empty(len(buffer) // rank.world_size)
    dist.reduce_scatter_tensor(mine, buffer)
    dist.all_gather_into_tensor(buffer, mine / rank.world_size)
    parts = buffer[: len(flat)].split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def reduced_while_backward_runs(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook starts the all-reduce of each parameter, and the step waits for all of them."""
    works = []

    def start(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad /= rank.world_size
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(start)
    loss(model, shard).backward()
    for work in works:
        work.wait()


def differentiated_and_averaged(
    model: nn.Module, shard: Any, rank: Rank
) -> dict[str, Tensor | None]:
    """autograd.grad returns the gradients instead of leaving them on the parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss(model, shard), parameters)
    for gradient in gradients:
        dist.all_reduce(gradient)
        gradient /= rank.world_size
    return dict(zip(names, gradients, strict=True))


BY_HAND: tuple[Step, ...] = (
    averaged_in_reverse_order,
    averaged_by_the_backend,
    averaged_as_one_buffer,
    averaged_in_float64,
    averaged_on_one_rank,
    scattered_and_gathered,
    reduced_while_backward_runs,
    differentiated_and_averaged,
)

SUMMED_IN_ANOTHER_ORDER: tuple[Step, ...] = (
    loss_over_gathered_outputs,
    global_mean,
    accumulated_under_no_sync,
    accumulated_with_every_reduction,
    hook_that_averages,
    scaled_by_world_size_and_back,
    scaled_and_unscaled,
)


@pytest.mark.parametrize("step", [*UNDER_DDP, *BY_HAND], ids=name)
def test_a_right_step_is_the_big_batch_in_float64(step: Step) -> None:
    assert_equivalent(regression("2x2"), step)


# On CUDA GradScaler unscales double, float and half only: github.com/pytorch/pytorch/issues/127176
@pytest.mark.needs_kernel(r"unscale_cuda\W+not implemented for 'BFloat16'")
@pytest.mark.parametrize("step", [*SUMMED_IN_ANOTHER_ORDER, *BY_HAND], ids=name)
def test_rounding_in_another_order_is_no_fault(step: Step) -> None:
    assert_equivalent(regression("1+2", dtype=torch.bfloat16), step)


@pytest.mark.parametrize("shards", ["11+7+6", "1+0+23", "uneven", "interleaved"])
def test_a_global_mean_is_the_big_batch_for_any_shards(shards: str) -> None:
    assert_equivalent(regression("1+2", shards=shards), global_mean)


def test_a_sum_handed_on_from_rank_to_rank_is_the_big_batch() -> None:
    assert_equivalent(regression("1+2"), averaged_around_a_ring, backend="gloo")
