"""What a step returned: None, or tensors by name. Everything else is told what would be right."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

RIGHT = (
    "A step returns None and leaves its gradients on the model that it is given, or it returns a "
    "dict of parameter name -> gradient (of parameter name -> weight, if the update is compared). "
    "It returns no loss and no metrics"
)


def tensors_by_name(returned: object) -> dict[str, Tensor | None]:
    """The dict that a step returned. Raises TypeError unless all its values are tensors or None."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"the step returned {_described(returned)}. {RIGHT}")
    for name, value in returned.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, Tensor)):
            what = f"a dict with {name!r}: {_described(value)}"
            raise TypeError(f"the step returned {what}. {RIGHT}")
    return dict(returned)


def _described(value: object) -> str:
    if isinstance(value, nn.Module):
        return (
            f"a module, {type(value).__name__} (of its gradients, return {{name: parameter.grad "
            "for name, parameter in module.named_parameters()}; of its weights, its state_dict())"
        )
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} ({', '.join(map(_described, value))})"
    if type(value).__module__ == "numpy":
        return f"a numpy {type(value).__name__}, which torch.from_numpy makes a tensor"
    return f"a {type(value).__name__}, {value!r:.40}"
