"""Gradients of one step: on one device, and on a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.skeleton.fresh import in_dtype, seed_all
from ddp_equivalence.report.script.skeleton.placeholders import (
    DTYPE,
    SEED,
    SHARDS,
    big_batches,
    loss,
    model_at_start,
    step,
)


def on_one_device(dtype: torch.dtype | None, scale: float = 1.0) -> dict[str, Tensor | None]:
    """The gradient of the big batch, in one process without any wrapper."""
    model = model_at_start().to(dtype or DTYPE)
    (batch,) = big_batches()
    seed_all(SEED + 1)
    (scale * loss(model, in_dtype(batch, dtype))).backward()
    return {
        name: None if one.grad is None else one.grad / scale
        for name, one in model.named_parameters()
    }


def on_this_rank(rank: Rank) -> dict[str, Tensor | None]:
    """What the step leaves on this rank, given its own shard."""
    model = model_at_start().to(rank.device)
    (batch,) = big_batches()
    shard = move(take(batch, SHARDS[0][rank.rank]), rank.device)
    seed_all(SEED + 1)
    returned = step(model, shard, rank)
    if returned is not None:
        return dict(returned)
    return {name: parameter.grad for name, parameter in model.named_parameters()}
