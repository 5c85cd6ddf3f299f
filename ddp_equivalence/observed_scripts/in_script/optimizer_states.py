"""What decides how an optimizer steps beside its gradients, as text that ranks can compare."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ddp_equivalence.observed_scripts.in_script.fetched import digest
from ddp_equivalence.observed_scripts.in_script.names import ModuleNames

PLAIN = (int, float, str, bool, type(None))


def steps_with(optimizer: Any, names: ModuleNames) -> dict[str, str]:
    """Its options, such as ``lr of group 0``, and its state, such as ``exp_avg of 0.weight``."""
    found: dict[str, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        found |= {f"{key} of group {number}": _text(value) for key, value in options.items()}
        for parameter in group["params"]:
            name, state = names.of_parameter(parameter), optimizer.state.get(parameter, {})
            if name is not None and isinstance(state, dict):
                found |= {f"{key} of {name}": _text(value) for key, value in state.items()}
    return found


def _text(value: Any) -> str:
    return ", ".join(map(_text_of_leaf, pytree.tree_leaves(value)))


def _text_of_leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"{leaf}" if isinstance(leaf, PLAIN) else ""
    if hasattr(leaf, "full_tensor"):
        return ""  # a shard differs between ranks
    return f"{leaf.item():g}" if leaf.numel() == 1 else digest(leaf)
