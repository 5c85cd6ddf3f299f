"""Several training steps, each on sixteen new examples: in one plain process, or under DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, vector_to_parameters
from torch.optim import Optimizer

from ddp_equivalence import Rank
from tests.claims.numbered import task
from tests.claims.setting import mse

BATCH = 16


@dataclass(frozen=True)
class Training:
    """The settings of a training.

    ``optimizer``: makes an optimizer of parameters. ``clip``: "after" clips to ``max_norm`` after
    the reduction, "before" clips before it, and "" does not clip. ``loss_times``: a factor on every
    rank's loss. ``shards``: the examples per rank. ``own_state``: the optimizer of rank 1 begins in
    another state than the others.
    """

    optimizer: Callable[..., Optimizer]
    steps: int = 10
    max_norm: float = 1.0
    clip: str = ""
    loss_times: float = 1.0
    shards: tuple[int, ...] = ()
    own_state: bool = False


def big_batch(training: Training) -> Tensor:
    """Train in one process, without wrapper.

    Returns the weights before the first step and after each, (steps + 1, 18).
    """
    model, rows, targets = task(BATCH * training.steps)
    optimizer = training.optimizer(model.parameters())
    weights = [flat(model)]
    for begin in range(0, len(rows), BATCH):
        optimizer.zero_grad()
        mse(model, rows[begin : begin + BATCH], targets[begin : begin + BATCH]).backward()
        if training.clip:
            clip_grad_norm_(model.parameters(), training.max_norm)
        optimizer.step()
        weights.append(flat(model))
    return torch.stack(weights)


def on_a_rank(rank: Rank, training: Training) -> Tensor:
    """The weights of one rank under DDP. If clipping comes first, gradients are reduced by hand."""
    model, rows, targets = task(BATCH * training.steps)
    by_hand = training.clip == "before"
    wrapped = model if by_hand else DistributedDataParallel(model)
    optimizer = training.optimizer(model.parameters())
    if training.own_state and rank.rank == 1:
        a_step_alone(model, optimizer)
    shards = training.shards or (BATCH // rank.world_size,) * rank.world_size
    first, last = [0, *accumulate(shards)][rank.rank : rank.rank + 2]
    weights = [flat(model)]
    for begin in range(0, len(rows), BATCH):
        mine = slice(begin + first, begin + last)
        optimizer.zero_grad()
        (mse(wrapped, rows[mine], targets[mine]) * training.loss_times).backward()
        if training.clip:
            clip_grad_norm_(model.parameters(), training.max_norm)
        if by_hand:
            average(model)
        optimizer.step()
        weights.append(flat(model))
    del wrapped
    return torch.stack(weights)


def a_step_alone(model: nn.Module, optimizer: Optimizer) -> None:
    """Make a step that changes the optimizer's state but leaves the weights as they were."""
    weights = flat(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    vector_to_parameters(weights, model.parameters())


def average(model: nn.Module) -> None:
    """All-reduce the gradients and divide them by the world size, by hand."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def flat(model: nn.Module) -> Tensor:
    """A copy of all weights in one row."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def differ_by(path: Tensor, expected: Tensor, begin: Tensor | None = None) -> float:
    """The largest distance between two paths after any step, relative to a length.

    The length is the distance of the expected path's end from ``begin``, by default its beginning.
    """
    length = expected[-1] - (expected[0] if begin is None else begin)
    return float((path - expected).norm(dim=1).max() / length.norm())
