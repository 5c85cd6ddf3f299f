"""DistributedDataParallel used as people misuse it: options, hooks, no_sync and the bare module."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    UnderDdp,
    average,
    deeper_mlp,
    gradients,
    mean_squared_error,
    part,
    pieces,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.unknown import UnknownBecause

programs = Programs("wrapper", right=False)


@programs.step()
def no_wrapper(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The model is never wrapped, and nothing is reduced."""
    mean_squared_error(model, shard).backward()


@programs.step()
def wrapper_not_kept(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The wrapper is freed after the forward pass, and its reducer with it."""
    mean_squared_error(DistributedDataParallel(model), shard).backward()


@programs.step()
def bare_module_called(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The model is wrapped, and the loss calls ddp.module."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp.module, shard).backward()


@programs.step()
def unwrapped_by_a_helper(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A helper that takes off wrappers before saving is also called before training."""
    ddp = DistributedDataParallel(model)

    def without_wrapper(module: nn.Module) -> nn.Module:
        return getattr(module, "module", module)

    mean_squared_error(without_wrapper(ddp), shard).backward()


@programs.step()
def no_sync_around_everything(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Forward and backward pass are both under no_sync."""
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        mean_squared_error(ddp, shard).backward()


@programs.step()
def no_sync_around_forward(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The forward pass is under no_sync, and it is the forward pass that decides."""
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        value = mean_squared_error(ddp, shard)
    value.backward()


@programs.step()
def synchronised_too_early(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last but one micro-batch reduces, and the last one does not."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 2)
    for number, each in enumerate(window):
        ddp.require_backward_grad_sync = number == len(window) - 2
        (mean_squared_error(ddp, each) / len(window)).backward()


@programs.step()
def accumulated_without_division(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Means over micro-batches are added, and nobody divides by their number."""
    ddp = DistributedDataParallel(model)
    *first, last = pieces(shard, 2)
    with ddp.no_sync():
        for each in first:
            mean_squared_error(ddp, each).backward()
    mean_squared_error(ddp, last).backward()


@programs.step()
def last_micro_batch_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are set to zero before every micro-batch."""
    ddp = DistributedDataParallel(model)
    for each in pieces(shard, 2):
        ddp.zero_grad()
        mean_squared_error(ddp, each).backward()


@programs.step()
def last_micro_batch_dropped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loop over micro-batches ends one too early."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 2)[:-1]
    sum(mean_squared_error(ddp, each) / len(window) for each in window).backward()


@programs.step()
def uneven_micro_batches_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A last micro-batch of fewer examples counts as much as the others."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 5)
    sum(mean_squared_error(ddp, each) / len(window) for each in window).backward()


@programs.step()
def divided_by_another_accumulation(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The divisor is the configured number of micro-batches; the shard has one fewer."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 2)
    sum(mean_squared_error(ddp, each) / (len(window) + 1) for each in window).backward()


@programs.step()
def accumulated_gradients_averaged_again(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Local gradients are added under no_sync, and the sum is divided by W twice."""
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        (mean_squared_error(ddp, shard) / rank.world_size).backward()
    average(model, rank)


@programs.step()
def multiplied_by_world_size(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss is multiplied by the world size, as if DDP did not average a mean."""
    ddp = DistributedDataParallel(model)
    (rank.world_size * mean_squared_error(ddp, shard)).backward()


@programs.step()
def averaged_again_after_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step divides by the world size what DDP has divided already."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    for gradient in gradients(model):
        gradient /= rank.world_size


@programs.step()
def summed_again_after_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The step all-reduces what DDP has averaged already."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    for gradient in gradients(model):
        dist.all_reduce(gradient)


def a_hook(factor: float) -> Any:
    """A communication hook that sums, and multiplies by a factor."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP checks its annotations
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * factor)

    return hook


@programs.step()
def hook_that_only_sums(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook replaces DDP's own division, and does not divide."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, a_hook(1.0))
    mean_squared_error(ddp, shard).backward()


@programs.step()
def hook_that_halves(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook averages and then halves."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, a_hook(0.5 / rank.world_size))
    mean_squared_error(ddp, shard).backward()


@programs.step()
def hook_that_does_nothing_at_all(model: nn.Module, shard: Any, rank: Rank) -> None:
    """noop_hook, meant for measurements of time, was left in."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    mean_squared_error(ddp, shard).backward()


@programs.step(model=deeper_mlp)
def hook_that_skips_the_last_bucket(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook reduces all buckets except for the last one."""

    def hook(state: object, bucket):  # type: ignore[no-untyped-def]  # DDP checks its annotations
        buffer = bucket.buffer()
        if bucket.is_last():
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(buffer)
            return done
        future = dist.all_reduce(buffer / rank.world_size, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    ddp.register_comm_hook(None, hook)
    mean_squared_error(ddp, shard).backward()


@programs.step()
def compressed_to_half_precision(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Torch's hook sends gradients in float16, in a program that computes in float64."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    mean_squared_error(ddp, shard).backward()


@programs.step(dtype=torch.float32)
def compressed_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Torch's hook sends gradients in float16, in a program that computes in float32."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    mean_squared_error(ddp, shard).backward()


@programs.step()
def hook_of_a_parameter_doubles(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A hook that boosts a learning rate doubles the gradient of one bias."""
    model[2].bias.register_hook(lambda gradient: 2 * gradient)
    UnderDdp(mean_squared_error)(model, shard, rank)


@programs.step()
def group_of_one(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP got a group with this rank alone."""
    groups = [dist.new_group([number]) for number in range(rank.world_size)]
    UnderDdp(mean_squared_error, {"process_group": groups[rank.rank]})(model, shard, rank)


@programs.step()
def method_called_past_the_wrapper(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss calls parts of the model by name, and not the wrapper."""
    ddp = DistributedDataParallel(model)
    first, *others = ddp.module
    hidden = first(shard["rows"])
    for layer in others:
        hidden = layer(hidden)
    F.mse_loss(hidden, shard["targets"]).backward()


@programs.step()
def first_half_called_bare(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Half of the shard goes through the wrapper, and half through the bare module first."""
    ddp = DistributedDataParallel(model)
    half = len(shard["rows"]) // 2
    UnderDdp(mean_squared_error)(model, part(shard, half, 2 * half), rank)
    for gradient in gradients(model):
        gradient /= 2
    (mean_squared_error(ddp.module, part(shard, 0, half)) / 2).backward()


@programs.step()
def weights_made_anew_on_each_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank initialises the model with its own random numbers, and averages by hand."""
    generator = torch.Generator().manual_seed(rank.rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    mean_squared_error(model, shard).backward()
    average(model, rank)


@programs.step(deadline=10, collective_deadline=3, unknown=UnknownBecause.RANKS_TIMED_OUT)
def early_return_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 1 finds nothing to do and returns, so that the others wait for it in vain."""
    if rank.rank == 1:
        return
    UnderDdp(mean_squared_error)(model, shard, rank)


@programs.step(deadline=10, collective_deadline=3, unknown=UnknownBecause.RANKS_TIMED_OUT)
def one_average_fewer_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 leaves out the last bias, so that the others wait for it in vain."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model)[: 3 if rank.rank == 0 else 4]:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
