"""A batch that is no plain pytree of tensors, or whose examples do not lie along dim 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.batch_tree import map_tensors
from ddp_equivalence.case.build import cast
from ddp_equivalence.report.script.template.placeholders import BATCH_DIMS


def take_examples(batch: Any, indices: Sequence[int]) -> Any:
    """The examples at ``indices``, in that order."""
    return take(batch, indices, BATCH_DIMS)


def in_dtype(batch: Any, dtype: torch.dtype | None) -> Any:
    """A copy of the batch with its floating-point tensors in this dtype; None keeps theirs."""

    def copied(leaf: Tensor) -> Tensor:
        return cast(leaf.detach(), dtype).clone().requires_grad_(leaf.requires_grad)

    return map_tensors(copied, batch)
