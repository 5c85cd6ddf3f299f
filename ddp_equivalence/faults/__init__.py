"""Fault injection: training broken on purpose, once for each cause that the diagnosis knows."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ddp_equivalence.faults.fault import Fault

FAULTS: dict[str, Fault] = {}
"""Those of all modules of this package that define ``FAULT``, by name."""

for _module in iter_modules(__path__):
    _fault: Fault | None = getattr(import_module(f"{__name__}.{_module.name}"), "FAULT", None)
    if _fault is not None:
        FAULTS[_fault.name] = _fault
