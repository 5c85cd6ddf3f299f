"""The buffers that a model has after its last step, and the tensors that its modules keep, under
their names from before it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ddp_equivalence.case.model_state import named_state
from ddp_equivalence.measurement.parameter_names import without_wrappers
from ddp_equivalence.measurement.plain_tensors import NotPlain, plain

MOST_ELEMENTS = 1 << 20
"""Of all of them together; a codebook of 2,048 entries of 256 elements with its averages fits."""


def buffers_left(model: nn.Module, before: Collection[str]) -> dict[str, Tensor]:
    """Copies of the buffers, as long as they are not large. ``before``: their names before the
    step.
    """
    found: dict[str, Tensor] = {}
    left = MOST_ELEMENTS
    for name, one in named_state(model):
        if one.numel() > left:
            continue
        left -= one.numel()
        try:
            with torch.no_grad():
                known = name if name in before else without_wrappers(name)
                found[known] = plain(one.detach()).to("cpu", copy=True)
        except (NotPlain, NotImplementedError, RuntimeError):  # it holds no values of its own
            continue
    return found
