"""Fault injection: training broken on purpose, once for each cause that the diagnosis knows."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ddp_equivalence.faults.fault import Fault

FAULTS: dict[str, Fault] = {}
"""Every ``Fault`` that a module of this package makes, by name, in the order of the names."""

_found: list[Fault] = []
for _module in iter_modules(__path__):
    _held = vars(import_module(f"{__name__}.{_module.name}")).values()
    _found += (one for one in _held if isinstance(one, Fault))
FAULTS.update({one.name: one for one in sorted(_found, key=lambda one: one.name)})
