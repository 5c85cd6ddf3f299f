"""The model and the big batches, built from the seed: the same in every process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
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


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def in_dtype(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch with its floating-point tensors in this dtype; None keeps theirs."""

    def cast(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if dtype and leaf.is_floating_point() else leaf.clone()

    return pytree.tree_map_only(Tensor, cast, batch)


def model_at_start() -> nn.Module:
    seed_all(SEED)
    return build_model().to(DTYPE)


def big_batches() -> list[Any]:
    """The big batch of every step, on the CPU."""
    seed_all(BATCH_SEED)
    batch = in_dtype(make_batch(torch.Generator().manual_seed(GENERATOR_SEED)), DTYPE)
    return [take(batch, examples) for examples in BIG_BATCHES]
