"""One backward pass of DistributedDataParallel on a rank, and the gradients of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from ddp_equivalence.strategies.ddp_sum_hook import sum_over_ranks
from tests.claims.setting import flat_gradient, model_and_batch

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RankGradients:
    """The result of one rank.

    ``gradient``: the gradient after DDP. ``own``: the gradient that this rank has alone. ``loss``:
    the loss of this rank.
    """

    gradient: Tensor
    own: Tensor
    loss: float


def wrapped(model: nn.Module, divides: bool) -> DistributedDataParallel:
    """The model in DDP. If not ``divides``, a communication hook adds gradients up instead."""
    ddp = DistributedDataParallel(model)
    if not divides:
        ddp.register_comm_hook(None, sum_over_ranks)
    return ddp


def ddp_gradient(
    rank: Rank, sizes: tuple[int, ...], loss: Loss, divides: bool = True
) -> RankGradients:
    """Run one backward pass in which rank r takes the next ``sizes[r]`` of the sixteen examples."""
    start = sum(sizes[: rank.rank])
    mine = slice(start, start + sizes[rank.rank])

    model, rows, targets = model_and_batch()
    ddp = wrapped(model, divides)
    value = loss(ddp, rows[mine], targets[mine])
    value.backward()
    gradient = flat_gradient(model)
    del ddp

    alone, *_ = model_and_batch()
    loss(alone, rows[mine], targets[mine]).backward()
    return RankGradients(gradient, flat_gradient(alone), float(value.detach()))
