"""The state of a model that is no parameter: buffers, and tensors that its modules keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every buffer of the model, and every tensor without a gradient that a module keeps as a plain
    attribute, by its name.
    """
    for path, module in model.named_modules():
        kept = [(name, one) for name, one in vars(module).items() if type(one) is Tensor]
        for name, one in (*module._buffers.items(), *kept):
            if one is not None and not one.requires_grad:
                yield f"{path}.{name}" if path else name, one


def put_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the model this state, in the dtypes that it has; what it does not have is left out."""
    now = dict(named_state(model))
    for name, value in state.items():
        if name in now:
            path, _, attribute = name.rpartition(".")
            like = now[name]
            setattr(model.get_submodule(path), attribute, value.to(like.device, like.dtype).clone())


def copied_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's state."""
    with torch.no_grad():
        return {name: one.detach().clone() for name, one in named_state(model)}
