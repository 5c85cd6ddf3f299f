"""Backward begins at the loss times a loss scale, and the gradient is not unscaled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ddp_equivalence.faults.fault import Fault, RecordFiring, shows_everywhere

SCALE = 1024.0


@contextmanager
def scale_loss(record_firing: RecordFiring) -> Iterator[None]:
    """Backward begins at a scaled loss."""
    backward = torch.autograd.backward

    def backward_of_scaled(tensors: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(tensors, Tensor) and tensors.ndim == 0:
            tensors = torch.amp.GradScaler("cpu", init_scale=SCALE).scale(tensors)
            record_firing()
        backward(tensors, *arguments, **named)

    with patch.object(torch.autograd, "backward", backward_of_scaled):
        yield


FAULT = Fault(
    name="gradient_scaled_not_unscaled",
    sentence="GradScaler scales the loss before backward, and nothing unscales the gradient.",
    break_torch=scale_loss,
    why_it_cannot_show=shows_everywhere,
    acts_at=("backward",),
)
