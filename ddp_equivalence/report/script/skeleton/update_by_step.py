"""How far plain SGD moves the weights: with big batches on one device, and with shards on ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.comparison.gradients import sgd_step, updates_of, weights_of
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
    """How far plain SGD on the big batches moves the weights, in one process."""
    model = model_at_start().to(dtype or DTYPE)
    before = weights_of(model)
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number)
        (scale * loss(model, in_dtype(batch, dtype))).backward()
        sgd_step(model, LEARNING_RATE / scale)
    return updates_of(model, before)


def on_this_rank(rank: Rank) -> dict[str, Tensor | None]:
    """How far the steps move the weights on this rank, given its own shards."""
    model = model_at_start().to(rank.device)
    before = weights_of(model)
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number)
        step(model, move(take(batch, SHARDS[number][rank.rank]), rank.device), rank)
        sgd_step(model, LEARNING_RATE)
    return updates_of(model, before)
