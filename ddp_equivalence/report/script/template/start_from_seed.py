"""The model and the big batches, built from the seed: the same in every process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.report.script.template.placeholders import (
    BATCH_SEED,
    BIG_BATCHES,
    DTYPE,
    GENERATOR_SEED,
    SEED,
    build_model,
    make_batch,
    take_examples,
)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def in_dtype(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating-point tensors in this dtype; None keeps theirs."""

    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if dtype and leaf.is_floating_point() else leaf.clone()

    return map_tensors(cast, batch)


def model_at_start() -> nn.Module:
    seed_all(SEED)
    return build_model().to(DTYPE)


def whole_batch() -> Any:
    """The examples of all steps, on the CPU."""
    seed_all(BATCH_SEED)
    return in_dtype(make_batch(torch.Generator().manual_seed(GENERATOR_SEED)), DTYPE)


def big_batches() -> list[Any]:
    """The big batch of every step."""
    batch = whole_batch()
    return [take_examples(batch, examples) for examples in BIG_BATCHES]
