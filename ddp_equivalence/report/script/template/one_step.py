"""The gradients of one step: on one device, and on a rank."""

from __future__ import annotations

import torch

from ddp_equivalence.case.batch import move
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.template.placeholders import (
    DTYPE,
    SEED,
    SEED_DISTANCE,
    SHARDS,
    Gradients,
    big_batches,
    loss,
    model_at_start,
    step,
    take_examples,
)
from ddp_equivalence.report.script.template.start_from_seed import in_dtype, seed_all


def on_one_device(dtype: torch.dtype | None, scale: float = 1.0) -> Gradients:
    """The gradients of the big batch, in one process without any wrapper."""
    model = model_at_start().to(dtype or DTYPE)
    (batch,) = big_batches()
    seed_all(SEED + 1)
    (scale * loss(model, in_dtype(batch, dtype))).backward()
    return {
        name: None if parameter.grad is None else parameter.grad / scale
        for name, parameter in model.named_parameters()
    }


def on_this_rank(rank: Rank) -> Gradients:
    """The gradients that the step leaves on this rank, given the rank's shard."""
    model = model_at_start().to(rank.device)
    (batch,) = big_batches()
    shard = move(take_examples(batch, SHARDS[0][rank.rank]), rank.device)
    seed_all(SEED + 1 + rank.rank * SEED_DISTANCE)
    returned = step(model, shard, rank)
    if returned is not None:
        return dict(returned)
    return {name: parameter.grad for name, parameter in model.named_parameters()}
