"""Models with shared, frozen, generated or wrapped parts, of which a step forgets one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.common import (
    HIDDEN,
    OUTPUTS,
    ROW,
    UnderDdp,
    average,
    gradients,
    mean_squared_error,
    mlp,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("structures", right=False)


class BodyAndHead(nn.Module):
    """A body, and a head whose part of the loss has a weight."""

    weight = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main = nn.Linear(ROW, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
        self.head = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(rows))
        return self.main(hidden) + self.weight * self.head(hidden)


class SmallHead(BodyAndHead):
    """The head adds little to the outputs."""

    weight = 0.003


class TinyHead(BodyAndHead):
    """The head adds next to nothing to the outputs."""

    weight = 1e-4


def all_but_the_head(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Average everything except for the head."""
    mean_squared_error(model, shard).backward()
    average(model.body, rank)
    average(model.main, rank)


@programs.step(model=BodyAndHead)
def body_and_main_wrapped_only(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Two parts are wrapped in DDP of their own, and the third is not."""
    body, main = DistributedDataParallel(model.body), DistributedDataParallel(model.main)
    hidden = torch.tanh(body(shard["rows"]))
    F.mse_loss(main(hidden) + model.head(hidden), shard["targets"]).backward()


@programs.step(model=BodyAndHead)
def head_skipped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The head is left out of the average."""
    all_but_the_head(model, shard, rank)


@programs.step(model=SmallHead)
def small_head_skipped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 0.003 is left out of the average."""
    all_but_the_head(model, shard, rank)


@programs.step(model=TinyHead)
def tiny_head_skipped(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 0.0001 is left out of the average."""
    all_but_the_head(model, shard, rank)


@programs.step(model=SmallHead, dtype=torch.float32)
def small_head_skipped_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 0.003 is left out of the average, in float32."""
    all_but_the_head(model, shard, rank)


@programs.step(model=TinyHead, dtype=torch.float32)
def tiny_head_skipped_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 0.0001 is left out of the average, in float32."""
    all_but_the_head(model, shard, rank)


@programs.step(model=SmallHead, dtype=torch.bfloat16)
def small_head_skipped_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 0.003 is left out of the average, in bfloat16."""
    all_but_the_head(model, shard, rank)


@programs.step(model=TinyHead, dtype=torch.bfloat16)
def tiny_head_skipped_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 0.0001 is left out of the average, in bfloat16."""
    all_but_the_head(model, shard, rank)


@programs.step(model=TinyHead, dtype=torch.float32)
def tiny_head_zeroed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradient of a head that counts 0.0001 is set to zero on all ranks."""
    UnderDdp(mean_squared_error)(model, shard, rank)
    for gradient in gradients(model.head):
        gradient.zero_()


@programs.step(model=TinyHead, dtype=torch.bfloat16)
def tiny_head_zeroed_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradient of a head that counts 0.0001 is set to zero on all ranks, in bfloat16."""
    tiny_head_zeroed(model, shard, rank)


class Adapter(nn.Module):
    """A trained weight with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, 2, bias=False)
        self.up = nn.Linear(2, OUTPUTS, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + self.up(self.down(rows))


@programs.step(model=Adapter)
def adapter_added_after_wrapping(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP is constructed while the adapter is frozen, so it never reduces the adapter."""
    for part in (model.down, model.up):
        part.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    for part in (model.down, model.up):
        part.requires_grad_(True)
    mean_squared_error(ddp, shard).backward()


@programs.step(model=Adapter)
def adapter_alone_averaged(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The adapter is averaged, and the base, which is trained as well, is not."""
    mean_squared_error(model, shard).backward()
    average(model.down, rank)
    average(model.up, rank)


@programs.step(model=BodyAndHead)
def head_frozen_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """requires_grad is switched off on the last rank, and its gradient counts as zero."""
    model.head.requires_grad_(rank.rank != rank.world_size - 1)
    mean_squared_error(model, shard).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average(model, rank)
    model.head.requires_grad_(True)


@programs.step(model=BodyAndHead)
def body_detached(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The hidden layer is detached before the head, as during a warm-up that never ended."""
    hidden = torch.tanh(model.body(shard["rows"]))
    F.mse_loss(model.main(hidden) + model.head(hidden.detach()), shard["targets"]).backward()
    average(model, rank)


@programs.step(model=BodyAndHead)
def body_detached_on_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """On rank 1 the hidden layer is detached before the head."""
    hidden = torch.tanh(model.body(shard["rows"]))
    seen = hidden.detach() if rank.rank == 1 else hidden
    F.mse_loss(model.main(hidden) + model.head(seen), shard["targets"]).backward()
    average(model, rank)


class Tied(nn.Module):
    """A decoder that is the transposed encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(HIDDEN, ROW) / 3), nn.Linear(ROW, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(rows @ self.weight.T) @ self.weight)


@programs.step(model=Tied)
def tied_weight_averaged_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The tied weight is in the list of encoder and decoder, and is divided for both."""
    mean_squared_error(model, shard).backward()
    for parameter in (model.weight, *model.last.parameters(), model.weight):
        dist.all_reduce(parameter.grad)
        parameter.grad /= rank.world_size**2 if parameter is model.weight else rank.world_size


@programs.step(model=Tied)
def tie_broken(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The decoder got a copy of the weight, whose gradient nobody adds."""
    hidden = torch.tanh(shard["rows"] @ model.weight.T) @ model.weight.detach()
    F.mse_loss(model.last(hidden), shard["targets"]).backward()
    average(model, rank)


class Checkpointed(nn.Module):
    """The activations of the first part are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(), nn.Linear(OUTPUTS, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(self.first(rows))


@programs.step(model=Checkpointed)
def reentrant_checkpoint_without_a_graph(model: nn.Module, shard: Any, rank: Rank) -> None:
    """No input of the reentrant checkpoint needs a gradient, so its layers get none."""
    hidden = checkpoint(model.first, shard["rows"], use_reentrant=True)
    F.mse_loss(model.last(hidden), shard["targets"]).backward()
    average(model, rank)


@programs.step(model=Checkpointed)
def checkpoint_runs_past_ddp(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The first part is called by itself, outside of the wrapper around the second."""
    ddp = DistributedDataParallel(model.last)
    hidden = checkpoint(model.first, shard["rows"], use_reentrant=False)
    F.mse_loss(ddp(hidden), shard["targets"]).backward()


@programs.step(layout="1x2")
def compiled_module_called_bare(model: nn.Module, shard: Any, rank: Rank) -> None:
    """DDP wraps the compiled model, and the loss calls the compiled model itself."""
    compiled = torch.compile(model, backend="eager")
    ddp = DistributedDataParallel(compiled)
    mean_squared_error(compiled, shard).backward()
    del ddp


@programs.step()
def gradients_of_a_copy_kept(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A copy is trained under DDP; the model itself gets the gradients of a local pass."""
    ddp = DistributedDataParallel(copy.deepcopy(model))
    mean_squared_error(ddp, shard).backward()
    mean_squared_error(model, shard).backward()


@programs.step()
def layers_swapped_on_the_way_back(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The two biases come back from the flat buffer in each other's place."""
    mean_squared_error(model, shard).backward()
    average(model, rank)
    first, last = model[0].bias.grad.clone(), model[2].bias.grad.clone()
    model[2].bias.grad.copy_(first[:OUTPUTS])
    model[0].bias.grad[:OUTPUTS] = last
