"""Notices the lines that set a plain attribute of a module, such as its mode or dropout rate."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType

from torch import nn

from ddp_equivalence.measurement.line_tracer import Handler

MOST_STATES = 500
"""Later ones are not recorded, since a model may count its own calls."""

PLAIN = (bool, int, float, str)


class ModuleStates:
    """``record(frame, what, name)`` gets what was set, such as ``training = False``, and the name
    of the module of ``model``, "" for the model itself.
    """

    def __init__(self, model: nn.Module, record: Callable[[FrameType, str, str], None]) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._record = record
        self._left = MOST_STATES

    def handlers(self) -> dict[CodeType, Handler]:
        """Every attribute of a module is set through one function of torch."""
        return {nn.Module.__setattr__.__code__: self._on_set}

    def _on_set(self, frame: FrameType) -> None:
        values = frame.f_locals
        module, attribute, value = values["self"], values["name"], values["value"]
        name = self._names.get(id(module))
        if name is None or not isinstance(value, PLAIN) or attribute.startswith("_"):
            return
        before = module.__dict__.get(attribute)
        if before == value or not isinstance(before, PLAIN) or not self._left:
            return
        self._left -= 1
        self._record(frame, f"{attribute} = {value!r}", name)
