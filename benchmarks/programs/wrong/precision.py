"""Scaling, clipping and casts that leave another gradient than that of the big batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.programs.common import (
    OUTPUTS,
    ROW,
    UnderDdp,
    average,
    classes,
    cross_entropy,
    double_mlp,
    global_sum,
    gradients,
    mean_squared_error,
    pieces,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("precision", right=False)

right_step = UnderDdp(mean_squared_error)


@programs.step(dtype=torch.float32)
def scaled_and_never_unscaled(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The loss is multiplied by 1024, and nobody divides the gradients."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * 1024).backward()


@programs.step(dtype=torch.float32)
def unscaled_twice(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A clip unscales the gradients, and then the optimizer's step does so again."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * 1024).backward()
    for gradient in gradients(model):
        gradient /= 1024**2


@programs.step(dtype=torch.float32)
def unscaled_by_an_updated_scale(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The scale has doubled between backward and unscaling."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * 1024).backward()
    for gradient in gradients(model):
        gradient /= 2048


@programs.step(dtype=torch.float32)
def scales_differ_by_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last rank has seen an infinity and halved its scale; it unscales by its own scale."""
    scale = 512 if rank.rank == rank.world_size - 1 else 1024
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * scale).backward()
    for gradient in gradients(model):
        gradient /= 1024


@programs.step(dtype=torch.float32)
def bias_unscaled_alone(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The optimizer that unscales has the biases, and the other one is not asked to."""
    ddp = DistributedDataParallel(model)
    (mean_squared_error(ddp, shard) * 8).backward()
    for gradient in gradients(model):
        gradient /= 8 if gradient.ndim == 1 else 1


@programs.step(dtype=torch.float32)
def skipped_on_an_overflow_of_one_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 finds an infinity before the average, and sets its own gradients to zero."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        gradient *= rank.rank != 0
    average(model, rank)


@programs.step()
def norm_clipped_before_the_average(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank clips its own norm, and then gradients are averaged."""
    mean_squared_error(model, shard).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    average(model, rank)


@programs.step()
def values_clipped_before_the_average(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Every rank clips single values, of which few are large."""
    mean_squared_error(model, shard).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    average(model, rank)


@programs.step()
def clipped_by_micro_batch(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The norm is clipped after every micro-batch, while gradients still add up."""
    ddp = DistributedDataParallel(model)
    window = pieces(shard, 2)
    for each in window:
        (mean_squared_error(ddp, each) / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


@programs.step()
def normalised_by_the_local_norm(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients are divided by the rank's own norm, and multiplied by the mean norm."""
    mean_squared_error(model, shard).backward()
    norm = nn.utils.get_total_norm(gradients(model)).item()
    mean = global_sum(norm, rank) / rank.world_size
    for gradient in gradients(model):
        gradient *= mean / norm
    average(model, rank)


@programs.step()
def noise_added_to_gradients(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Noise of a millionth, the same on all ranks, is added as for privacy."""
    right_step(model, shard, rank)
    generator = torch.Generator().manual_seed(0)
    for gradient in gradients(model):
        gradient += 1e-6 * torch.randn(gradient.shape, generator=generator)


@programs.step(model=double_mlp)
def averaged_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients of a model that is built in float64 pass through float32 for the all-reduce."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        narrow = gradient.float()
        dist.all_reduce(narrow, op=dist.ReduceOp.AVG)
        gradient.copy_(narrow)


@programs.step(dtype=torch.float32)
def averaged_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients of a float32 model pass through bfloat16 for the all-reduce."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        narrow = gradient.bfloat16()
        dist.all_reduce(narrow)
        gradient.copy_(narrow / rank.world_size)


@programs.step(dtype=torch.float32)
def trained_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A narrower copy computes the gradients of a float32 model."""
    narrow = copy.deepcopy(model).bfloat16()
    ddp = DistributedDataParallel(narrow)
    mean_squared_error(ddp, {name: leaf.bfloat16() for name, leaf in shard.items()}).backward()
    for parameter, rounded in zip(model.parameters(), narrow.parameters(), strict=True):
        parameter.grad = rounded.grad.float()


@programs.step(dtype=torch.bfloat16)
def summed_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients in bfloat16 are summed and never divided."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model):
        dist.all_reduce(gradient)


@programs.step(dtype=torch.bfloat16)
def never_reduced_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Gradients in bfloat16 stay where they are."""
    mean_squared_error(model, shard).backward()


@programs.step(dtype=torch.float32, batch=classes, loss=cross_entropy)
def last_bias_left_out_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last bias is left out of the average, in float32."""
    cross_entropy(model, shard).backward()
    for gradient in gradients(model)[:-1]:
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)


class ManyHeads(nn.Module):
    """Four heads, each of which counts a tenth of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(ROW, OUTPUTS) for _ in range(4)])

    def forward(self, rows: Tensor) -> Tensor:
        return sum(0.1**n * head(rows) for n, head in enumerate(self.heads))


def smallest_head_left_out(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Average all heads but the last."""
    mean_squared_error(model, shard).backward()
    for head in model.heads[:-1]:
        average(head, rank)


@programs.step(model=ManyHeads, dtype=torch.float32)
def smallest_head_local_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The head that counts least is left out of the average, in float32."""
    smallest_head_left_out(model, shard, rank)


@programs.step(model=ManyHeads, dtype=torch.bfloat16)
def smallest_head_local_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The head that counts least is left out of the average, in bfloat16."""
    smallest_head_left_out(model, shard, rank)


@programs.step(model=ManyHeads, dtype=torch.bfloat16)
def smallest_head_zero_on_a_rank(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The head that counts least adds nothing on rank 0, in bfloat16."""
    mean_squared_error(model, shard).backward()
    for gradient in gradients(model.heads[-1]):
        gradient *= rank.rank != 0
    average(model, rank)


@programs.step(dtype=torch.float32)
def ranks_rounded_apart(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The ranks' gradients differ in the last bits, so that their weights drift apart."""
    right_step(model, shard, rank)
    model[0].weight.grad *= 1 + rank.rank * 1e-6
