"""Habits of scripts that break data-parallel training, some of them without any message."""

from __future__ import annotations

import copy
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    EXAMPLES,
    HIDDEN,
    OUTPUTS,
    ROW,
    UnderDdp,
    average,
    deeper_mlp,
    gradients,
    mean_squared_error,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank
from ddp_equivalence.diagnosis.unknown import UnknownBecause

programs = Programs("habits", right=False)

plain = UnderDdp(mean_squared_error)
SHORT = {"deadline": 10, "collective_deadline": 3}


class Spare(nn.Module):
    """A model with a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
        self.spare = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(rows)))


@programs.model()
class UnusedParametersWithoutSearch(Spare):
    """DDP waits for the gradient of an unused head, and in the first step reduces nothing."""


def same_layers() -> nn.Module:
    """Three layers of one shape, and a last one."""
    layers = [nn.Linear(ROW, ROW) for _ in range(3)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(ROW, OUTPUTS))


@programs.step(model=same_layers)
def order_differs_by_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Ranks call the all-reduces of equal shapes in different orders, so that layers mix."""
    mean_squared_error(model, shard).backward()
    layers = list(model[:3])
    for layer in layers[rank.rank % 3 :] + layers[: rank.rank % 3] + [model[4]]:
        for gradient in gradients(layer):
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


@programs.step(unknown=UnknownBecause.RANK_FAILED, **SHORT)
def raises_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last rank raises before its backward pass."""
    ddp = DistributedDataParallel(model)
    value = mean_squared_error(ddp, shard)
    if rank.rank == rank.world_size - 1:
        raise ValueError("a bad example")
    value.backward()


@programs.step(unknown=UnknownBecause.RANK_FAILED, **SHORT)
def leaves_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 has finished and exits with 0."""
    plain(model, shard, rank)
    if rank.rank == 0:
        sys.exit(0)


@programs.step(unknown=UnknownBecause.RANKS_TIMED_OUT, **SHORT)
def never_ends_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 1 waits for a file that never comes."""
    ddp = DistributedDataParallel(model)
    value = mean_squared_error(ddp, shard)
    while rank.rank == 1:
        time.sleep(0.1)
    value.backward()


@programs.step(unknown=UnknownBecause.RANK_FAILED, **SHORT)
def shapes_differ_by_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 all-reduces the first matrix while the others all-reduce the first bias."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model)[rank.rank > 0 :]:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


@programs.step(shards="own", unknown=UnknownBecause.IDENTICAL_INPUTS)
def whole_batch_shuffled_apart(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Every rank trains on the whole batch in an order of its own, and nothing is shared out.

    The average is right by luck, as it is without a sampler.
    """
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(rank.rank))
    plain(model, {name: leaf[order] for name, leaf in batch.items()}, rank)


@programs.step(shards="own", unknown=UnknownBecause.IDENTICAL_INPUTS)
def all_inputs_gathered(model: nn.Module, batch: Any, rank: Rank) -> None:
    """Ranks gather each other's examples, and each computes the whole big batch by itself."""
    mine = {name: leaf[rank.rank :: rank.world_size] for name, leaf in batch.items()}
    everything = {}
    for name, leaf in mine.items():
        parts = [torch.empty_like(leaf.contiguous()) for _ in range(rank.world_size)]
        dist.all_gather(parts, leaf.contiguous())
        everything[name] = torch.cat(parts)
    mean_squared_error(model, everything).backward()


@programs.step()
def returns_only_the_right_ones(
    model: nn.Module, shard: Any, rank: Rank
) -> dict[str, Tensor | None]:
    """The step returns the gradients that it has averaged, and not the local one."""
    mean_squared_error(model, shard).backward()
    average(model[0], rank)
    return {f"0.{name}": p.grad for name, p in model[0].named_parameters()}


@programs.step()
def returns_gradients_of_the_wrapper(
    model: nn.Module, shard: Any, rank: Rank
) -> dict[str, Tensor | None]:
    """A hook has halved what is returned under the names of the wrapper."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) / 2).backward()
    return {name: p.grad for name, p in ddp.named_parameters()}


@programs.step(unknown=UnknownBecause.RANK_FAILED)
def metrics_returned_and_nothing_reduced(
    model: nn.Module, shard: Any, rank: Rank
) -> dict[str, Tensor]:
    """Metrics are averaged and returned, and gradients are not averaged."""
    value = mean_squared_error(model, shard)
    value.backward()
    metrics = torch.stack([value.detach(), value.detach() ** 2])
    dist.all_reduce(metrics, op=dist.ReduceOp.AVG)
    return {"loss": metrics[0]}


@programs.step()
def head_replaced_after_wrapping(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last layer is replaced by a copy after the model was wrapped; DDP knows the old one."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[2] = copy.deepcopy(model[2])
    mean_squared_error(ddp, shard).backward()


@programs.step()
def parameter_replaced_after_wrapping(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A bias is a new nn.Parameter after the model was wrapped; DDP knows the old one."""
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model[2].bias = nn.Parameter(model[2].bias.detach().clone())
    mean_squared_error(ddp, shard).backward()


@programs.step(model=deeper_mlp)
def part_averaged_by_its_name(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A filter by name meant for decay skips all biases in the average."""
    mean_squared_error(model, shard).backward()
    for name, parameter in model.named_parameters():
        if "bias" not in name:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


@programs.step()
def averaged_once_in_a_while(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A counter that starts at one lets only every second step be reduced."""
    mean_squared_error(model, shard).backward()
    steps_done = 1
    if steps_done % 2 == 0:
        average(model, rank)


@programs.step()
def detached_for_the_log(model: nn.Module, shard: Any, rank: Rank) -> None:
    """On rank 0 the loss for the log is the loss of the training, and was detached."""
    ddp = DistributedDataParallel(model)
    outputs = ddp(shard["rows"])
    value = F.mse_loss(outputs, shard["targets"])
    if rank.rank == 0:
        value = value.detach() + 0 * outputs.sum()
    value.backward()


@programs.step()
def gradients_of_the_last_check_added(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A sanity check of the loss goes backward first, and its gradient is never set to zero."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, {name: leaf[:1] for name, leaf in shard.items()}).backward()
    mean_squared_error(ddp, shard).backward()


@programs.step()
def dropout_seeded_by_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Dropout is applied with a generator for each rank; the big batch has none."""
    generator = torch.Generator().manual_seed(rank.rank)
    keep = torch.rand(shard["rows"].shape, generator=generator) > 0.1
    plain(model, shard | {"rows": shard["rows"] * keep / 0.9}, rank)
