"""Right ways to average gradients by hand: none may be called a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ddp_equivalence import Rank, assert_equivalent
from tests.equivalence.small_regression import Step, loss, name, regression


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


@pytest.mark.parametrize("step", BY_HAND, ids=name)
def test_a_right_step_is_the_big_batch_in_float64(step: Step) -> None:
    assert_equivalent(regression("2x2"), step)


@pytest.mark.parametrize("step", BY_HAND, ids=name)
def test_rounding_in_another_order_is_no_fault(step: Step) -> None:
    assert_equivalent(regression("1+2", dtype=torch.bfloat16), step)


def test_a_sum_handed_on_from_rank_to_rank_is_the_big_batch() -> None:
    assert_equivalent(regression("1+2"), averaged_around_a_ring, backend="gloo")
