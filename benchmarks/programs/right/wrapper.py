"""Right ways to use DistributedDataParallel, its options, its hooks and no_sync."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    OUTPUTS,
    UnderDdp,
    average,
    deeper_mlp,
    global_sum,
    mean_squared_error,
    mlp,
    part,
    pieces,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.unknown import UnknownBecause

programs = Programs("wrapper", right=True)


@programs.step(model=deeper_mlp)
def many_options_at_once(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Tiny buckets, views of them, a search for unused parameters and no broadcast of buffers."""
    options = {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True, "broadcast_buffers": False}
    UnderDdp(mean_squared_error, options | {"find_unused_parameters": True})(model, shard, rank)


@programs.step()
def without_initial_broadcast(model: nn.Module, shard: Any, rank: Rank) -> None:
    """init_sync=False is right here, because all ranks have built the same weights."""
    UnderDdp(mean_squared_error, {"init_sync": False})(model, shard, rank)


@programs.step()
def a_group_of_its_own(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP uses a new group of all ranks."""
    UnderDdp(mean_squared_error, {"process_group": dist.new_group()})(model, shard, rank)


@programs.step(
    model=deeper_mlp,
    dtype=torch.float32,  # DDP's buffer for it is always float32
    unknown=UnknownBecause.COLLECTIVE_NOT_WAITED_FOR,
)
def delayed_all_reduce(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last bias is reduced when the first weight has its gradient, and DDP does not wait."""
    (first, weight), *_, (name, bias) = model.named_parameters()
    assert first == "0.weight"
    options = {"delay_all_reduce_named_params": [(name, bias)], "param_to_hook_all_reduce": weight}
    UnderDdp(mean_squared_error, options)(model, shard, rank)


@programs.step(model=deeper_mlp)
def hook_written_in_cpp(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP's built-in hook all-reduces and divides."""
    ddp = DistributedDataParallel(model)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    mean_squared_error(ddp, shard).backward()


@programs.step()
def hook_that_does_nothing(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP's noop_hook leaves local gradients, which the step averages itself."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    mean_squared_error(ddp, shard).backward()
    average(model, rank)


@programs.step()
def low_rank_hook_that_has_not_started(model: nn.Module, shard: Any, rank: Rank) -> None:
    """PowerSGD averages plainly in its first thousand iterations."""
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=1000)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    mean_squared_error(ddp, shard).backward()


@programs.step()
def local_sgd_hook_that_has_not_started(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook of post-local SGD averages over all ranks before its start."""
    ddp = DistributedDataParallel(model)
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    mean_squared_error(ddp, shard).backward()


@programs.step(model=deeper_mlp)
def hook_that_gathers(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hook gathers all ranks' buckets and takes their mean."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        everywhere = [torch.empty_like(bucket.buffer()) for _ in range(rank.world_size)]
        dist.all_gather(everywhere, bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(torch.stack(everywhere).mean(0))
        return future

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    mean_squared_error(ddp, shard).backward()


@programs.step()
def replicated_in_place(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The composable replicate() turns the module itself into a data-parallel one."""
    replicate(model)
    mean_squared_error(model, shard).backward()


@programs.step(model=deeper_mlp)
def every_part_wrapped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Each linear layer has a wrapper of its own."""
    parts = [DistributedDataParallel(each) if list(each.parameters()) else each for each in model]
    hidden = shard["rows"]
    for each in parts:
        hidden = each(hidden)
    F.mse_loss(hidden, shard["targets"]).backward()


class LossInside(nn.Module):
    """A model together with its loss, as many trainers wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
        outputs = self.model(rows)
        return {"loss": F.mse_loss(outputs, targets), "outputs": outputs}


@programs.step()
def wrapped_with_its_loss(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP wraps a module that takes keywords, computes the loss and returns a dict."""
    ddp = DistributedDataParallel(LossInside(model))
    ddp(**shard)["loss"].backward()


@programs.step()
def uneven_micro_batches(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every micro-batch counts by its number of examples, the last and smallest too."""
    ddp = DistributedDataParallel(model)
    *first, last = pieces(shard, 5)
    with ddp.no_sync():
        for each in first:
            (mean_squared_error(ddp, each) * len(each["rows"]) / len(shard["rows"])).backward()
    (mean_squared_error(ddp, last) * len(last["rows"]) / len(shard["rows"])).backward()


@programs.step()
def all_micro_batches_under_no_sync(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Nothing is reduced in backward, and the step averages by hand at the end."""
    ddp = DistributedDataParallel(model)
    with ddp.no_sync():
        for each in pieces(shard, 2):
            (mean_squared_error(ddp, each) * 2 / len(shard["rows"])).backward()
    average(model, rank)


@programs.step()
def flag_instead_of_no_sync(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The flag behind no_sync is set by hand, as some trainers do."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 3)
    for number, each in enumerate(window):
        ddp.require_backward_grad_sync = number == len(window) - 1
        (mean_squared_error(ddp, each) / len(window)).backward()


@programs.step()
def different_numbers_of_micro_batches(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Ranks cut their shards into different numbers of pieces; only the last one reduces."""
    ddp = DistributedDataParallel(model)
    *first, last = pieces(shard, 1 + rank.rank)
    with ddp.no_sync():
        for each in first:
            (mean_squared_error(ddp, each) * len(each["rows"]) / len(shard["rows"])).backward()
    (mean_squared_error(ddp, last) * len(last["rows"]) / len(shard["rows"])).backward()


@programs.step()
def loss_summed_over_micro_batches(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The losses of all micro-batches are added first, and one backward pass follows."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 2)
    sum(mean_squared_error(ddp, each) / len(window) for each in window).backward()


@programs.step()
def inside_join(model: nn.Module, shard: Any, rank: Rank) -> None:
    """ddp.join() changes nothing if all ranks have one batch."""
    ddp = DistributedDataParallel(model)
    with ddp.join():
        mean_squared_error(ddp, shard).backward()


@programs.step(shards="7+17", layout="1x2")
def uneven_shards_with_a_common_divisor(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank divides its sum by the mean number of examples of a rank."""
    ddp = DistributedDataParallel(model)
    each = global_sum(len(shard["rows"]), rank) / rank.world_size
    total = (ddp(shard["rows"]) - shard["targets"]).square().sum()
    (total / (each * OUTPUTS)).backward()


@programs.step()
def two_models_of_which_one_is_asked_for(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A second model under DDP is trained beside the first, with its own backward pass."""
    other = mlp().to(shard["rows"].dtype)
    first, second = DistributedDataParallel(model), DistributedDataParallel(other)
    mean_squared_error(second, shard).backward()
    mean_squared_error(first, shard).backward()


@programs.step()
def validated_on_the_bare_module(model: nn.Module, shard: Any, rank: Rank) -> None:
    """ddp.module is called under no_grad on a part of the shard, which leaves no gradient."""
    ddp = DistributedDataParallel(model)
    value = mean_squared_error(ddp, shard)
    with torch.no_grad():
        mean_squared_error(ddp.module, part(shard, 0, 2))
    value.backward()
