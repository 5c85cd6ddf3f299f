"""What the buffers of a model hold after its last step, under their names from before it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from ddp_equivalence.measurement.buffer_watch import MOST_ELEMENTS
from ddp_equivalence.measurement.parameter_names import without_wrappers
from ddp_equivalence.measurement.plain_tensors import NotPlain, plain


def buffers_left(model: nn.Module, before: Collection[str]) -> dict[str, Tensor]:
    """Copies of the buffers; {} if they are large. ``before``: their names before the step."""
    buffers = {
        name if name in before else without_wrappers(name): one
        for name, one in model.named_buffers()
    }
    if sum(one.numel() for one in buffers.values()) > MOST_ELEMENTS:
        return {}
    found = {}
    for name, one in buffers.items():
        try:
            with torch.no_grad():
                found[name] = plain(one.detach()).to("cpu", copy=True)
        except (NotPlain, NotImplementedError, RuntimeError):  # it holds no values of its own
            continue
    return found
