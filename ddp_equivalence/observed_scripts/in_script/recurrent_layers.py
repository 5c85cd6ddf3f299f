"""Lets the dropout inside recurrent layers draw from torch's own generator, on a GPU too.

There cuDNN drops with a generator of its own, whose state can neither be read nor set. Without
cuDNN, torch computes the same layers with its own kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_equivalence.ranks.torch_frames import counts_as_torch


def let_torch_draw(module: nn.Module) -> None:
    """Leave cuDNN out of the layers of a module that drop something on a GPU.

    Layers are changed one by one, since a class whose method is replaced cannot be scripted.
    """
    for layer in module.modules():
        drops = isinstance(layer, nn.RNNBase) and layer.dropout
        if drops and next(layer.parameters()).is_cuda and "forward" not in vars(layer):
            layer.forward = functools.partial(_without_cudnn, layer.forward)


@counts_as_torch
def _without_cudnn(forward: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=False):
        return forward(*arguments, **named)
