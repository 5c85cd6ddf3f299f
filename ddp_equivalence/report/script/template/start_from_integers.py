"""The model and the big batches with small integers as values, whose sums are exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.report.script.template.placeholders import (
    BIG_BATCHES,
    DTYPE,
    SEED,
    build_model,
    take_examples,
)
from ddp_equivalence.report.script.template.start_from_seed import seed_all, whole_batch


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
    """The big batch of the only step that an exact case has."""
    batch = take_examples(whole_batch(), BIG_BATCHES[0])
    return [map_tensors(to_integers, batch)]
