"""What a caller has probably meant by an argument of the wrong type, as an error says it."""

from __future__ import annotations

import torch
from torch import nn

INSTEAD_OF_BATCH = (
    "a function (torch.Generator) -> pytree of tensors, because every process makes its own: "
    "batch=lambda generator: ..."
)
"""What a batch must be, if it is given as tensors."""


def instead_of_dtype(value: object) -> str:
    """What a dtype must be, if it is the name of one of torch's, as in ``"float32"``; else ""."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    dtype = getattr(torch, name, None)
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return f"{dtype}, without quotes" if is_float else ""


def instead_of_model(model: object) -> str:
    """What a model must be, if it is a module and not a function that builds one; else ""."""
    if not isinstance(model, nn.Module):
        return ""
    return (
        "a function that builds the model, because every process builds its own: "
        f"model=lambda: {type(model).__name__}(...)"
    )


def instead_of_loss(loss: object) -> str:
    """What a loss must be, if it is one of torch's losses, which take other arguments; else ""."""
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    if not str(getattr(kind, "__module__", "")).startswith("torch.nn."):
        return ""
    name = str(getattr(kind, "__name__", "loss"))
    call = f"{name}()" if isinstance(kind, type) else name
    return (
        "a function (model, batch) -> scalar tensor, which calls the model itself: "
        f'loss=lambda model, batch: {call}(model(batch["inputs"]), batch["targets"])'
    )
