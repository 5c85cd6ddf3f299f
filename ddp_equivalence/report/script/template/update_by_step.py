"""The change of the weights by plain SGD: with big batches on one device, with shards on ranks."""

from __future__ import annotations

import torch

from ddp_equivalence.case.batch import move
from ddp_equivalence.comparison.gradients import sgd_step, updates_of, weights_of
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.template.placeholders import (
    DTYPE,
    LEARNING_RATE,
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
    """The change of the weights by plain SGD on the big batches, in one process."""
    model = model_at_start().to(dtype or DTYPE)
    before = weights_of(dict(model.named_parameters()))
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number)
        (scale * loss(model, in_dtype(batch, dtype))).backward()
        sgd_step(model, LEARNING_RATE / scale)
    return updates_of(dict(model.named_parameters()), before)


def on_this_rank(rank: Rank) -> Gradients:
    """The change of the weights by the steps on this rank, given the rank's shards."""
    model = model_at_start().to(rank.device)
    before = weights_of(dict(model.named_parameters()))
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number + rank.rank * SEED_DISTANCE)
        step(model, move(take_examples(batch, SHARDS[number][rank.rank]), rank.device), rank)
        sgd_step(model, LEARNING_RATE)
    return updates_of(dict(model.named_parameters()), before)
