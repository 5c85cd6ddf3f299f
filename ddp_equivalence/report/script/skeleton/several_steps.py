"""Gradients of several steps, with plain SGD between them: on one device, and on a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.comparison.gradients import sgd_step
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.skeleton.fresh import in_dtype, seed_all
from ddp_equivalence.report.script.skeleton.placeholders import (
    DTYPE,
    LEARNING_RATE,
    SEED,
    SHARDS,
    big_batches,
    loss,
    model_at_start,
    step,
)


def on_one_device(dtype: torch.dtype | None, scale: float = 1.0) -> dict[str, Tensor | None]:
    """The gradients of the big batches, in one process without any wrapper."""
    model = model_at_start().to(dtype or DTYPE)
    found: dict[str, Tensor | None] = {}
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number)
        (scale * loss(model, in_dtype(batch, dtype))).backward()
        for name, one in model.named_parameters():
            one.grad = None if one.grad is None else one.grad / scale
            found[f"{name} (step {number + 1})"] = one.grad
        sgd_step(model, LEARNING_RATE)
    return found


def on_this_rank(rank: Rank) -> dict[str, Tensor | None]:
    """What the step leaves on this rank each time, given its own shard."""
    model = model_at_start().to(rank.device)
    found: dict[str, Tensor | None] = {}
    for number, batch in enumerate(big_batches()):
        shard = move(take(batch, SHARDS[number][rank.rank]), rank.device)
        model.zero_grad()
        seed_all(SEED + 1 + number)
        returned = step(model, shard, rank)
        for name, one in model.named_parameters():
            if returned is not None:
                one.grad = returned.get(name)
            found[f"{name} (step {number + 1})"] = None if one.grad is None else one.grad.clone()
        sgd_step(model, LEARNING_RATE)
    return found
