"""The model and the big batches with small integers as values, whose sums are exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import take
from ddp_equivalence.report.script.template.placeholders import (
    BATCH_SEED,
    BIG_BATCHES,
    DTYPE,
    GENERATOR_SEED,
    SEED,
    build_model,
    make_batch,
)
from ddp_equivalence.report.script.template.start_from_seed import in_dtype, seed_all


def to_integers(values: Tensor) -> Tensor:
    """The values scaled and rounded to integers from -3 to 3."""
    if not values.is_floating_point():
        return values
    largest = values.abs().max() if values.numel() else 1
    return (values / largest * 3).round()


def model_at_start() -> nn.Module:
    seed_all(SEED)
    model = build_model().to(DTYPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(to_integers(parameter))
    return model


def big_batches() -> list[Any]:
    """The big batch of every step, on the CPU."""
    seed_all(BATCH_SEED)
    batch = in_dtype(make_batch(torch.Generator().manual_seed(GENERATOR_SEED)), DTYPE)
    batch = pytree.tree_map_only(Tensor, to_integers, batch)
    return [take(batch, examples) for examples in BIG_BATCHES]
