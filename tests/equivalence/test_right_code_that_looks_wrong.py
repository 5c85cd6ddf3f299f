"""Right ways to train that look like known faults: none may be called one.

A check that calls these wrong is switched off by its users, and then finds nothing at all. Each
step says in one line why it is right; models and data are those of ``plain_case``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.nn import functional as with_gradient
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from ddp_equivalence import Case, Rank, assert_equivalent

EXAMPLES, ROW, OUTPUTS = 24, 5, 3

Step = Callable[[nn.Module, Any, Rank], Any]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(ROW, 7), nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, OUTPUTS))


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "rows": torch.randn(EXAMPLES, ROW, generator=generator),
        "targets": torch.randn(EXAMPLES, OUTPUTS, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["rows"]), batch["targets"])


def plain_case(layout: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Case:
    fields: dict[str, Any] = {"model": build, "batch": make_batch, "loss": loss, "dtype": dtype}
    return Case(**(fields | {"layout": layout} | changes))


def micro_batches(shard: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Of two examples each."""
    for rows, targets in zip(shard["rows"].split(2), shard["targets"].split(2), strict=True):
        yield {"rows": rows, "targets": targets}


# Under DDP.


def no_sync_around_backward_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The forward pass decides whether its backward reduces, and was outside."""
    ddp = DistributedDataParallel(model)
    value = loss(ddp, shard)
    with ddp.no_sync():
        value.backward()


def loss_over_gathered_outputs(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gather's backward adds up what every rank says of these outputs; DDP divides by that."""
    ddp = DistributedDataParallel(model)
    outputs = torch.cat(with_gradient.all_gather(ddp(shard["rows"])))
    targets = [torch.empty_like(shard["targets"]) for _ in range(rank.world_size)]
    dist.all_gather(targets, shard["targets"])
    F.mse_loss(outputs, torch.cat(targets)).backward()


def global_mean(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum times world size, which DDP divides by, over the count of all ranks."""
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
    """A bucket for each parameter: more collectives, the same sums."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
    loss(ddp, shard).backward()


def huge_bucket(model: nn.Module, shard: Any, rank: Rank) -> None:
    """One bucket for all: one collective, the same sums."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=1024)
    loss(ddp, shard).backward()


def looks_for_unused(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Looking for unused parameters where there are none costs time, and nothing else."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss(ddp, shard).backward()


def static_graph(model: nn.Module, shard: Any, rank: Rank) -> None:
    """In its first iteration a static graph reduces at the end of backward, but reduces."""
    ddp = DistributedDataParallel(model, static_graph=True)
    loss(ddp, shard).backward()


def accumulated_under_no_sync(model: nn.Module, shard: Any, rank: Rank) -> None:
    """All but the last micro-batch stay local, and the last reduces the sum of all."""
    ddp = DistributedDataParallel(model)
    *first, last = micro_batches(shard)
    with ddp.no_sync():
        for one in first:
            (loss(ddp, one) / (len(first) + 1)).backward()
    (loss(ddp, last) / (len(first) + 1)).backward()


def accumulated_with_every_reduction(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Slower: averaging what is already averaged again leaves it as it is."""
    ddp = DistributedDataParallel(model)
    window = list(micro_batches(shard))
    for one in window:
        (loss(ddp, one) / len(window)).backward()


def accumulated_and_divided_at_the_end(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The division may come after the reduction as well as before it."""
    ddp = DistributedDataParallel(model)
    *first, last = micro_batches(shard)
    with ddp.no_sync():
        for one in first:
            loss(ddp, one).backward()
    loss(ddp, last).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= len(first) + 1


def hook_of_torch(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Torch's own hook divides and all-reduces, as DDP does without one."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    loss(ddp, shard).backward()


def hook_that_averages(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook replaces DDP's division, and this one divides after the sum."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / rank.world_size)

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    loss(ddp, shard).backward()


def loss_divided_and_hook_that_sums(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook never divides, since the loss already has."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    (loss(ddp, shard) / rank.world_size).backward()


def scaled_by_world_size_and_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss times world size, and the gradients divided by it afterwards."""
    ddp = DistributedDataParallel(model)
    (rank.world_size * loss(ddp, shard)).backward()
    for parameter in model.parameters():
        parameter.grad.div_(rank.world_size)  # type: ignore[union-attr]


def scaled_and_unscaled(model: nn.Module, shard: Any, rank: Rank) -> None:
    """GradScaler scales the loss and unscales the gradients, by the same factor on all ranks."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    scaler.scale(loss(ddp, shard)).backward()
    scaler.unscale_(optimizer)


def a_clip_that_does_not_bite(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Clipping to a norm above that of the gradient multiplies it by one."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e3)
    nn.utils.clip_grad_value_(model.parameters(), clip_value=1e3)


def zeros_kept(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients of zero instead of None: what is added to them is the same."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    ddp.zero_grad(set_to_none=False)
    loss(ddp, shard).backward()


def evaluates_in_between(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Forward passes without a graph, through wrapper and model, before and after the loss."""
    ddp = DistributedDataParallel(model)
    with torch.no_grad():
        ddp(shard["rows"])
    value = loss(ddp, shard)
    with torch.no_grad():
        model(shard["rows"] + 1)
    value.backward()


def two_forward_passes_one_backward(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Two halves through the wrapper, one loss: every gradient is complete when it is reduced."""
    ddp = DistributedDataParallel(model)
    outputs = torch.cat([ddp(half) for half in shard["rows"].chunk(2)])
    F.mse_loss(outputs, shard["targets"]).backward()


def examples_in_another_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A mean does not depend on the order of its examples."""
    ddp = DistributedDataParallel(model)
    order = torch.arange(len(shard["rows"])).flip(0)
    loss(ddp, {name: values[order] for name, values in shard.items()}).backward()


def wrapped_copy(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor | None]:
    """The model trained is a copy, and its gradients are handed back by name."""
    mine = copy.deepcopy(model)
    ddp = DistributedDataParallel(mine)
    loss(ddp, shard).backward()
    return {name: parameter.grad for name, parameter in mine.named_parameters()}


def cloned_by_name(model: nn.Module, shard: Any, rank: Rank) -> dict[str, Tensor | None]:
    """Clones are handed back, and what is on the model is spoilt afterwards."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=False)
    return found  # type: ignore[return-value]


# Reduced by hand.


def averaged_in_reverse_order(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every parameter has a sum of its own: their order is free, if it is the same on all ranks."""
    loss(model, shard).backward()
    for parameter in reversed(list(model.parameters())):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size


def averaged_by_the_backend(model: nn.Module, shard: Any, rank: Rank) -> None:
    """ReduceOp.AVG divides by itself."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def averaged_as_one_buffer(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Flattened into one buffer, divided before the sum, and copied back."""
    loss(model, shard).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    buffer = torch.cat([gradient.flatten() for gradient in gradients]) / rank.world_size
    dist.all_reduce(buffer)
    parts = buffer.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def averaged_in_float64(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradients of all ranks gathered, and their mean taken in a wider type."""
    loss(model, shard).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        found = [torch.empty_like(parameter.grad) for _ in range(rank.world_size)]
        dist.all_gather(found, parameter.grad)
        parameter.grad = torch.stack(found).double().mean(0).to(parameter.dtype)


def averaged_around_a_ring(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The sum grows from rank to rank, and the last one's goes round once more."""
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
    """Reduced to the last rank, divided there, and broadcast."""
    loss(model, shard).backward()
    last = rank.world_size - 1
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.reduce(parameter.grad, dst=last)
        parameter.grad /= rank.world_size
        dist.broadcast(parameter.grad, src=last)


def scattered_and_gathered(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank sums its part of a buffer that is filled up to a multiple of the world size."""
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
    """A hook on each parameter starts its all-reduce, and all are waited for."""
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
    """autograd.grad leaves nothing on the parameters; what it returns is averaged."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss(model, shard), parameters)
    for gradient in found:
        dist.all_reduce(gradient)
        gradient /= rank.world_size
    return dict(zip(names, found, strict=True))


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

PRECISION_IS_THE_POINT: tuple[Step, ...] = (
    *BY_HAND,
    loss_over_gathered_outputs,
    global_mean,
    accumulated_under_no_sync,
    accumulated_with_every_reduction,
    hook_that_averages,
    scaled_by_world_size_and_back,
    scaled_and_unscaled,
)


def name(step: Step) -> str:
    return step.__name__


@pytest.mark.parametrize("layout", ["2x2", "1+2"])
@pytest.mark.parametrize("step", [*UNDER_DDP, *BY_HAND], ids=name)
def test_a_right_step_is_the_big_batch_in_float64(step: Step, layout: str) -> None:
    assert_equivalent(plain_case(layout), step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("step", PRECISION_IS_THE_POINT, ids=name)
def test_rounding_in_another_order_is_no_fault(step: Step, dtype: torch.dtype) -> None:
    assert_equivalent(plain_case("1+2", dtype), step)


@pytest.mark.parametrize("layout", ["2x2", "1+2"])
def test_a_sum_handed_on_from_rank_to_rank_is_the_big_batch(layout: str) -> None:
    assert_equivalent(plain_case(layout), averaged_around_a_ring, backend="gloo")


@pytest.mark.parametrize("shards", ["11+7+6", "1+0+23", "uneven", "interleaved"])
def test_a_global_mean_is_the_big_batch_for_any_shards(shards: str) -> None:
    assert_equivalent(plain_case("1+2", shards=shards), global_mean)


# Trainers, compared by how far the weights moved after two steps.


def two_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, joined: Any) -> None:
    """The examples of two big batches, joined, are two steps."""
    for half in range(2):
        optimizer.zero_grad()
        batch = {key: values.chunk(2)[half] for key, values in joined.items()}
        loss(ddp, batch).backward()
        optimizer.step()


def trains_a_static_graph(model: nn.Module, joined: Any, rank: Rank) -> None:
    """From the second iteration on the order of the first is used."""
    ddp = DistributedDataParallel(model, static_graph=True)
    two_steps(ddp, torch.optim.SGD(model.parameters(), lr=0.1), joined)


def trains_with_bucket_views_and_zeros(model: nn.Module, joined: Any, rank: Rank) -> None:
    """Buckets are rebuilt after the first iteration, under the gradients that live in them."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    two_steps(ddp, torch.optim.SGD(model.parameters(), lr=0.1), joined)


def trains_with_a_scaler(model: nn.Module, joined: Any, rank: Rank) -> None:
    """The scaler unscales before it lets the optimizer step."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=4096.0)
    for half in range(2):
        optimizer.zero_grad()
        batch = {key: values.chunk(2)[half] for key, values in joined.items()}
        scaler.scale(loss(ddp, batch)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("layout", ["2x2", "1+2"])
@pytest.mark.parametrize(
    "trainer",
    [trains_a_static_graph, trains_with_bucket_views_and_zeros, trains_with_a_scaler],
    ids=name,
)
def test_a_right_trainer_moves_as_the_big_batch_does(trainer: Step, layout: str) -> None:
    assert_equivalent(plain_case(layout, batch=two_batches), trainer, compare="update", steps=2)


def two_batches(generator: torch.Generator) -> dict[str, Tensor]:
    first, second = make_batch(generator), make_batch(generator)
    return {key: torch.cat([first[key], second[key]]) for key in first}


def with_a_sampler(model: nn.Module, everything: Any, rank: Rank) -> None:
    """A sampler assigns every example to one rank, in an order of its own."""
    ddp = DistributedDataParallel(model)
    sampler: DistributedSampler[int] = DistributedSampler(
        range(EXAMPLES),  # type: ignore[arg-type]
        rank.world_size,
        rank.rank,
        shuffle=True,
        seed=5,
    )
    mine = torch.tensor(list(sampler))
    loss(ddp, {key: values[mine] for key, values in everything.items()}).backward()


@pytest.mark.parametrize("layout", ["2x2", "1+2"])
def test_a_sampler_that_shuffles_is_the_big_batch(layout: str) -> None:
    assert_equivalent(plain_case(layout, shards="own"), with_a_sampler)
