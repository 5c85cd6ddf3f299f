"""The same case with dropout turned off, in the reference and on all ranks."""

from __future__ import annotations

from dataclasses import fields

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ddp_equivalence.case.case import Case


class CaseWithoutDropout(Case):
    """A case whose model drops nothing, also where the step puts it into training mode."""


def without_dropout(case: Case) -> CaseWithoutDropout:
    """The case with dropout turned off."""
    return CaseWithoutDropout(**{field.name: getattr(case, field.name) for field in fields(case)})


def trains_with_dropout(model: nn.Module) -> bool:
    """True if torch's own modules drop something when the model is called as it is now."""
    return any(
        module.training and getattr(module, name) > 0 for module, name in _probabilities(model)
    )


def turn_off_dropout(model: nn.Module) -> None:
    """Let torch's own modules drop nothing."""
    for module, name in _probabilities(model):
        setattr(module, name, 0.0)


def _probabilities(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules of the model that drop something, and the attribute with the probability."""
    found: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            found.append((module, "p"))
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            found.append((module, "dropout"))
    return found
