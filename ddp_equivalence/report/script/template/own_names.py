"""Runs the user's step, and returns what it leaves under the names that parameters had before."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.template.placeholders import Gradients, users_step

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def gradients_of_step(model: nn.Module, shard: Any, rank: Rank) -> Gradients:
    """The gradients that the step returns or leaves on the model."""
    before = parameters_before(model)
    returned = users_step(model, shard, rank)
    if returned is not None:
        return by_own_names(returned, model, before)
    return {name: parameter.grad for name, parameter in parameters_now(model, before).items()}


def weights_after_step(model: nn.Module, shard: Any, rank: Rank) -> Gradients:
    """The weights that the step returns or leaves in the model."""
    before = parameters_before(model)
    returned = users_step(model, shard, rank)
    if returned is not None:
        return by_own_names(returned, model, before)
    return dict(parameters_now(model, before))


@cache
def parameters_before(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by their names before the first step."""
    return dict(model.named_parameters())


def parameters_now(model: nn.Module, before: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The step may have wrapped a part of the model, which renames parameters, or replaced some."""
    now = dict(model.named_parameters())
    held = {id(parameter) for parameter in now.values()}
    found = {name: one if id(one) in held else now.get(name) for name, one in before.items()}
    return {name: parameter for name, parameter in found.items() if parameter is not None}


def by_own_names(
    returned: Gradients, model: nn.Module, before: Mapping[str, nn.Parameter]
) -> Gradients:
    """What the step returned, without buffers, and without what wrappers insert into names."""
    own = {without_wrappers(name): name for name in before}
    not_compared = {without_wrappers(name) for name in model.state_dict()} - own.keys()
    return {
        name if name in before else own.get(without_wrappers(name), name): tensor
        for name, tensor in returned.items()
        if without_wrappers(name) not in not_compared
    }


def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
