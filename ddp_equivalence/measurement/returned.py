"""What a step returned: None, or tensors by name. Everything else is told what would be right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from torch import Tensor, nn

RIGHT = (
    "A step returns None and leaves its gradients on the model that it is given, or it returns a "
    "dict of parameter name -> gradient (of parameter name -> weight, if the update is compared). "
    "It returns no loss and no metrics"
)


MOST_ITEMS = 3


def tensors_by_name(returned: object) -> dict[str, Tensor | None]:
    """The dict that a step returned. Raises TypeError unless all its values are tensors or None."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"the step returned {_described(returned)}. {RIGHT}")
    for name, value in returned.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, Tensor)):
            what = f"a dict with {name!r}: {_described(value)}"
            raise TypeError(f"the step returned {what}. {RIGHT}")
    return dict(returned)


def no_parameters(returned: Iterable[str], parameters: Iterable[str]) -> TypeError:
    """The error for a dict of tensors in which no name is that of a parameter of the model."""
    names, model = _listed(returned), _listed(parameters)
    which = (
        f"the names {names}, none of which is a parameter"
        if "," in names
        else f"the name {names}, which is no parameter"
    )
    return TypeError(f"the step returned a dict with {which} of the model ({model}). {RIGHT}")


def _described(value: object) -> str:
    if isinstance(value, nn.Module):
        return (
            f"a module, {type(value).__name__} (for its gradients, return {{name: parameter.grad "
            "for name, parameter in module.named_parameters()}; for its weights, its state_dict())"
        )
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with {_listed(map(repr, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} ({_listed(map(_described, value))})"
    if type(value).__module__ == "numpy":
        return f"a numpy {type(value).__name__}, which torch.from_numpy makes a tensor"
    shown = f", {value!r:.40}" if isinstance(value, bool | int | float | str) else ""
    return f"a {type(value).__name__}{shown}"


def _listed(texts: Iterable[str]) -> str:
    first = list(islice(texts, MOST_ITEMS + 1))
    return ", ".join(first[:MOST_ITEMS]) + (", ..." if len(first) > MOST_ITEMS else "")
