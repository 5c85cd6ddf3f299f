"""The gradients of several steps, with plain SGD between them: on one device, and on a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.case.batch import move
from ddp_equivalence.comparison.gradients import sgd_step
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
    """The gradients of the big batches, in one process without any wrapper."""
    model = model_at_start().to(dtype or DTYPE)
    gradients: dict[str, Tensor | None] = {}
    for number, batch in enumerate(big_batches()):
        model.zero_grad()
        seed_all(SEED + 1 + number)
        (scale * loss(model, in_dtype(batch, dtype))).backward()
        for name, parameter in model.named_parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / scale
            gradients[f"{name} (step {number + 1})"] = parameter.grad
        sgd_step(model, LEARNING_RATE)
    return gradients


def on_this_rank(rank: Rank) -> Gradients:
    """The gradients that each step leaves on this rank, given the rank's shard."""
    model = model_at_start().to(rank.device)
    parameters = dict(model.named_parameters())  # the step may rename them
    gradients: dict[str, Tensor | None] = {}
    for number, batch in enumerate(big_batches()):
        shard = move(take_examples(batch, SHARDS[number][rank.rank]), rank.device)
        model.zero_grad()
        seed_all(SEED + 1 + number + rank.rank * SEED_DISTANCE)
        returned = step(model, shard, rank)
        for name, parameter in parameters.items():
            if returned is not None:
                parameter.grad = returned.get(name)
            gradient = None if parameter.grad is None else parameter.grad.clone()
            gradients[f"{name} (step {number + 1})"] = gradient
        sgd_step(model, LEARNING_RATE)
    return gradients
