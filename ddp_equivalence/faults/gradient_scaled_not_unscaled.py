"""Backward begins at the loss times a loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ddp_equivalence.faults.fault import Fault, Fire

SCALE = 1024.0


@contextmanager
def scaled(fire: Fire) -> Iterator[None]:
    """Backward begins at a scaled loss."""
    backward = torch.autograd.backward

    def of_scaled(tensors: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(tensors, Tensor) and tensors.ndim == 0:
            tensors = torch.amp.GradScaler("cpu", init_scale=SCALE).scale(tensors)
            fire()
        backward(tensors, *arguments, **named)

    with patch.object(torch.autograd, "backward", of_scaled):
        yield


FAULT = Fault(
    name="gradient_scaled_not_unscaled",
    sentence="GradScaler scales the loss before backward, and nothing unscales the gradient.",
    in_torch=scaled,
    hidden=lambda layout: None,
)
