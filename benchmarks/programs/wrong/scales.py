"""Faults that are tiny, or in parameters whose gradients are tiny or zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.programs.common import (
    EXAMPLES,
    OUTPUTS,
    ROW,
    Batch,
    UnderDdp,
    average,
    gradients,
    mean_squared_error,
)
from benchmarks.programs.program import Programs
from ddp_equivalence import Rank

programs = Programs("scales", right=False)

right_step = UnderDdp(mean_squared_error)


def multiplied(model: nn.Module, shard: Any, rank: Rank, factor: float) -> None:
    """A right step, after which all gradients are multiplied."""
    right_step(model, shard, rank)
    for gradient in gradients(model):
        gradient *= factor


@programs.step()
def a_million_millionth_too_large(model: nn.Module, shard: Any, rank: Rank) -> None:
    """All gradients are multiplied by 1 + 1e-12, in float64."""
    multiplied(model, shard, rank, 1 + 1e-12)


@programs.step(dtype=torch.float32)
def a_ten_thousandth_too_large(model: nn.Module, shard: Any, rank: Rank) -> None:
    """All gradients are multiplied by 1 + 1e-4, in float32."""
    multiplied(model, shard, rank, 1 + 1e-4)


@programs.step(dtype=torch.bfloat16)
def doubled_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """All gradients are doubled, in bfloat16."""
    multiplied(model, shard, rank, 2)


@programs.step()
def one_rank_holds_nan(model: nn.Module, shard: Any, rank: Rank) -> None:
    """On rank 1 one number is NaN after the average."""
    right_step(model, shard, rank)
    if rank.rank == 1:
        model[0].weight.grad[0, 0] = float("nan")


@programs.step()
def all_ranks_hold_nan(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 divides by zero, and the average carries that to all ranks."""
    mean_squared_error(model, shard).backward()
    if rank.rank == 0:
        model[2].bias.grad *= float("nan")
    average(model, rank)


@programs.step()
def infinite_on_all_ranks(model: nn.Module, shard: Any, rank: Rank) -> None:
    """One number is infinite on all ranks."""
    right_step(model, shard, rank)
    model[0].bias.grad[1] = float("inf")


@programs.step(model=lambda: nn.Sequential(nn.Linear(ROW, ROW), nn.Tanh(), nn.Linear(ROW, 3)))
def square_matrix_transposed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradient of a square matrix comes back transposed."""
    right_step(model, shard, rank)
    model[0].weight.grad.copy_(model[0].weight.grad.T.clone())


class FarHead(nn.Module):
    """A head whose outputs are scaled by a small factor."""

    factor = 1e-8

    def __init__(self) -> None:
        super().__init__()
        self.main, self.head = nn.Linear(ROW, OUTPUTS), nn.Linear(ROW, OUTPUTS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.main(rows) + self.factor * self.head(rows)


class FartherHead(FarHead):
    """A head that counts one part in a million millions."""

    factor = 1e-12


class NearHead(FarHead):
    """A head that counts a hundredth of a thousandth."""

    factor = 1e-5


def head_zeroed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Set the gradient of the head to zero on all ranks, after a right step."""
    right_step(model, shard, rank)
    for gradient in gradients(model.head):
        gradient.zero_()


@programs.step(model=FarHead)
def far_head_zeroed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 1e-8 is set to zero, in float64."""
    head_zeroed(model, shard, rank)


@programs.step(model=FartherHead)
def farther_head_zeroed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 1e-12 is set to zero, in float64."""
    head_zeroed(model, shard, rank)


@programs.step(model=NearHead, dtype=torch.float32)
def near_head_zeroed_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 1e-5 is set to zero, in float32."""
    head_zeroed(model, shard, rank)


@programs.step(model=FarHead, dtype=torch.float32)
def far_head_zeroed_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 1e-8 is set to zero, in float32."""
    head_zeroed(model, shard, rank)


@programs.step(model=FarHead, dtype=torch.float32)
def far_head_doubled_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The gradient of a head that counts 1e-8 is doubled, in float32."""
    right_step(model, shard, rank)
    for gradient in gradients(model.head):
        gradient *= 2


@programs.step(model=FarHead, dtype=torch.bfloat16)
def far_head_zeroed_in_bfloat16(model: nn.Module, shard: Any, rank: Rank) -> None:
    """A head that counts 1e-8 is set to zero, in bfloat16."""
    head_zeroed(model, shard, rank)


def pairs(generator: torch.Generator) -> Batch:
    """Two rows for each example; the first is the better one."""
    return {"rows": torch.randn(EXAMPLES, 2, ROW, generator=generator)}


def ranked(model: nn.Module, batch: Batch) -> Tensor:
    """A hinge on the difference of two scores, from which the last bias cancels."""
    first, second = model(batch["rows"])[..., 0].unbind(1)
    return F.relu(1 - first + second).mean()


@programs.step(batch=pairs, loss=ranked)
def garbage_where_zero_is_right(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last bias has no gradient in the big batch; on the ranks it is a millionth."""
    UnderDdp(ranked)(model, shard, rank)
    model[2].bias.grad.fill_(1e-6)


@programs.step(batch=pairs, loss=ranked, dtype=torch.float32)
def garbage_where_zero_is_right_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The last bias has no gradient in the big batch; on the ranks it is a hundredth."""
    UnderDdp(ranked)(model, shard, rank)
    model[2].bias.grad.fill_(1e-2)


@programs.step()
def smallest_number_left_out(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The smallest number of the first matrix is set to zero on all ranks."""
    right_step(model, shard, rank)
    flat = model[0].weight.grad.view(-1)
    flat[flat.abs().argmin()] = 0


@programs.step(dtype=torch.float32)
def smallest_number_left_out_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The smallest number of the first matrix is set to zero on all ranks, in float32."""
    smallest_number_left_out(model, shard, rank)


@programs.step()
def factors_that_average_to_one(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Rank 0 counts a tenth more, and the last rank a tenth less."""
    last = rank.world_size - 1
    factor = {0: 1.1, last: 0.9}.get(rank.rank, 1.0)
    (factor * mean_squared_error(model, shard)).backward()
    average(model, rank)


@programs.step(compare="update", lr=1e-6)
def very_small_rate_summed(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate is a millionth, and gradients are multiplied by the world size."""
    ddp = DistributedDataParallel(model)
    (rank.world_size * mean_squared_error(ddp, shard)).backward()
    SGD(model.parameters(), 1e-6).step()


@programs.step(compare="update", lr=1e-3, dtype=torch.float32)
def small_rate_a_twentieth_off_in_float32(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The rate is a twentieth too high, in float32."""
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD(model.parameters(), 1.05e-3).step()


@programs.loss(step=UnderDdp(mean_squared_error))
def penalty_of_a_million_millionth_forgotten(model: nn.Module, batch: Batch) -> Tensor:
    """The step leaves out a penalty on the weights of 1e-10."""
    return mean_squared_error(model, batch) + 1e-10 * sum(
        p.square().sum() for p in model.parameters()
    )


@programs.step(model=FarHead, compare="update", lr=0.1)
def head_frozen_for_good(model: nn.Module, shard: Any, rank: Rank) -> None:
    """The head is frozen before the step and never trained, in the comparison of updates."""
    model.head.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    mean_squared_error(ddp, shard).backward()
    SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
