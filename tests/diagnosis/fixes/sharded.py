"""Models whose parameters are sharded: clipped by norms of shards, and what never reaches them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from ddp_equivalence import Rank
from tests.diagnosis.fixes.programs import Batch, shows
from tests.diagnosis.fixes.reductions import Tied
from tests.diagnosis.names.small_case import average, case
from tests.package.own_cases import loss


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


TRAINED = {"compare": "update", "optimizer": optimizer}
CLIPPED = {**TRAINED, "clip": 0.1}


@shows(
    "local_norm_clipped",
    "call clip_grad_norm_ of the FullyShardedDataParallel, which adds up all shards.",
    {"clip_grad_norm_(model.parameters(), 0.1)": "model.clip_grad_norm_(0.1)"},
    case(dtype=torch.float32),  # in which FSDP adds up the squares
    **CLIPPED,
)
def clips_the_parts_of_flat_parameters(model: Any, shard: Batch, rank: Rank) -> None:
    model = FullyShardedDataParallel(model, device_id=rank.device, use_orig_params=True)
    of_model = optimizer(model.parameters())
    loss(model, shard).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    of_model.step()


@shows(
    "local_norm_clipped",
    "add up the squares of all ranks' shards before the root, as clip_grad_norm_ does.",
    {"    norm = ": "    dist.all_reduce(squares)\n    norm = "},
    None,
    **CLIPPED,
)
def clips_by_the_norm_of_its_shards(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model)
    of_model = optimizer(model.parameters())
    loss(model, shard).backward()
    local = [parameter.grad.to_local() for parameter in model.parameters()]
    squares = torch.stack([one.square().sum() for one in local]).sum()
    norm = squares.sqrt()
    for one in local:
        one.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))
    of_model.step()


@shows(
    "replicated_norm_counted_twice",
    "add the squares of replicated parameters to the norm on one rank only.",
    {"if one.ndim == 1": "if one.ndim == 1 and rank.rank == 0"},
    None,
    **CLIPPED,
)
def counts_the_biases_on_every_rank(model: Any, shard: Batch, rank: Rank) -> None:
    of_model = optimizer(model.parameters())
    loss(model, shard).backward()
    average(model, rank.world_size)
    gradients = [parameter.grad for parameter in model.parameters()]
    weights = [one.square().sum() for one in gradients if one.ndim > 1]
    squares = torch.stack(weights).sum() / rank.world_size  # as if each rank had a part of them
    for one in gradients:
        if one.ndim == 1:
            squares += one.square().sum()
    dist.all_reduce(squares)
    clip_grads_with_norm_(model.parameters(), 0.1, squares.sqrt())
    of_model.step()


@shows(
    "clipped_while_scaled",
    "divide the gradients by the loss scale before they are clipped, not afterwards.",
    {
        "    clip_grad_norm_(model.parameters(), 0.1)\n    divide(model, 512.0)\n": (
            "    divide(model, 512.0)\n    clip_grad_norm_(model.parameters(), 0.1)\n"
        )
    },
    None,
    **CLIPPED,
)
def divides_by_the_scale_after_clipping(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model)
    of_model = optimizer(model.parameters())
    (512.0 * loss(model, shard)).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    divide(model, 512.0)
    of_model.step()


@torch.no_grad()
def divide(model: Any, scale: float) -> None:
    for parameter in model.parameters():
        parameter.grad.div_(scale)


@shows(
    "averaged_twice",
    "call set_gradient_divide_factor on each module that fully_shard was given: it is for one "
    "module alone.",
    {"model.set_gradient": "model[0].set_gradient_divide_factor(1.0)\n    model.set_gradient"},
)
def sets_the_divide_factor_of_the_root(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model[0])
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    total = torch.tensor(len(shard["rows"]))
    dist.all_reduce(total)
    own = nn.functional.mse_loss(model(shard["rows"]), shard["targets"], reduction="sum")
    (own / total / shard["targets"].shape[1]).backward()


@shows(
    "gradient_sync_off",
    "call set_requires_gradient_sync(True) before the last micro-batch of a step.",
    {"number == 0": "number == 1"},
)
def reduces_the_first_micro_batch(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model)
    for number, rows in enumerate(shard["rows"].chunk(2)):
        model.set_requires_gradient_sync(number == 0)
        (loss(model, {"rows": rows, "targets": shard["targets"].chunk(2)[number]}) / 2).backward()


@shows(
    "replicated_module_not_called",
    "call the module that replicate was given, not a method or a part of it.",
    {"model.forward(shard": "model(shard"},
)
def calls_forward(model: Any, shard: Batch, rank: Rank) -> None:
    replicate(model)
    nn.functional.mse_loss(model.forward(shard["rows"]), shard["targets"]).backward()


@shows(
    "ignored_parameter",
    "reduce 0.weight yourself, or do not ignore it.",
    {", ignored_states=[model[0].weight]": ""},
)
def ignores_a_weight(model: Any, shard: Batch, rank: Rank) -> None:
    model = FullyShardedDataParallel(model, device_id=rank.device, ignored_states=[model[0].weight])
    loss(model, shard).backward()


@shows(
    "reduce_dtype",
    "give FSDP reduce_dtype=torch.float64.",
    {"reduce_dtype=torch.bfloat16": "reduce_dtype=torch.float64"},
)
def reduces_in_bfloat16(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    loss(model, shard).backward()


@shows(
    "optimizer_built_before_sharding",
    "build the optimizer after the model is sharded.",
    {
        "    of_model = optimizer(model.parameters())\n    fully_shard(model)\n": (
            "    fully_shard(model)\n    of_model = optimizer(model.parameters())\n"
        )
    },
    None,
    **TRAINED,
)
def builds_the_optimizer_first(model: Any, shard: Batch, rank: Rank) -> None:
    fully_shard(model[0])
    of_model = optimizer(model.parameters())
    fully_shard(model)
    loss(model, shard).backward()
    of_model.step()


@shows(
    "tied_weights_parted",
    "tie first.weight again after the model is built, before it is sharded.",
    {"    fresh.load": "    fresh.second.weight = fresh.first.weight\n    fresh.load"},
    case(model=Tied),
)
def parts_tied_weights(model: Any, shard: Batch, rank: Rank) -> Any:
    with torch.device("meta"):
        fresh: nn.Module = Tied().double()
    fresh.to_empty(device=rank.device)
    fresh.load_state_dict(model.state_dict())
    loss(fresh, shard).backward()
    average(fresh, rank.world_size)
    return {name: fresh.get_parameter(name).grad for name, _ in model.named_parameters()}
