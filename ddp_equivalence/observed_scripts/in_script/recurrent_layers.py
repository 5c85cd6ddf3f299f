"""Lets the dropout inside recurrent layers draw from torch's own generator, on a GPU too.

There cuDNN drops with a generator of its own, whose state can neither be read nor set. Without
cuDNN, torch computes the same layers with its own kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ddp_equivalence.ranks.torch_frames import counts_as_torch


def let_torch_draw() -> None:
    """Replace the forward passes of recurrent layers."""
    for layer in (nn.RNN, nn.LSTM, nn.GRU):
        _leave_cudnn_out(layer)


def _leave_cudnn_out(layer: Any) -> None:
    forward = layer.forward

    @counts_as_torch
    @functools.wraps(forward)
    def watched(self: nn.RNNBase, *arguments: Any, **named: Any) -> Any:
        if not (self.dropout and self.training and next(self.parameters()).is_cuda):
            return forward(self, *arguments, **named)
        with torch.backends.cudnn.flags(enabled=False):
            return forward(self, *arguments, **named)

    layer.forward = watched
