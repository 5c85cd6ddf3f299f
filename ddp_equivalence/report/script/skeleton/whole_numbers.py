"""Model and big batches of small integers: every order of summation is exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import take
from ddp_equivalence.report.script.skeleton.fresh import in_dtype, seed_all
from ddp_equivalence.report.script.skeleton.placeholders import (
    BIG_BATCHES,
    DTYPE,
    SEED,
    build_model,
    make_batch,
)


def whole_numbers(values: Tensor) -> Tensor:
    """Rounded to integers from -3 to 3."""
    if not values.is_floating_point():
        return values
    largest = values.abs().max() if values.numel() else 1
    return (values / largest * 3).round()


def model_at_start() -> nn.Module:
    seed_all(SEED)
    model = build_model().to(DTYPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(whole_numbers(parameter))
    return model


def big_batches() -> list[Any]:
    """The big batch, on the CPU."""
    seed_all(SEED)
    batch = in_dtype(make_batch(torch.Generator().manual_seed(SEED)), DTYPE)
    batch = pytree.tree_map_only(Tensor, whole_numbers, batch)
    return [take(batch, examples) for examples in BIG_BATCHES]
