"""Fault injection: training broken on purpose, for each cause that the diagnosis knows."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from ddp_equivalence.case.errors import SuiteBug
from ddp_equivalence.faults.fault import Fault

FAULTS: dict[str, Fault] = {}
"""Every fault that a module of this package makes, by name."""


def faults_in(modules: Iterable[ModuleType]) -> dict[str, Fault]:
    """Every ``Fault`` in these modules, by name. Raises SuiteBug if two have one name."""
    found: dict[str, tuple[Fault, str]] = {}
    for module in modules:
        for constant, fault in vars(module).items():
            if isinstance(fault, Fault):
                place = f"{module.__name__}.{constant}"
                first, first_place = found.setdefault(fault.name, (fault, place))
                if first is not fault:
                    both = f"{first_place} and {place} are both named {fault.name!r}"
                    raise SuiteBug(f"{both}: give each fault a name of its own, and its ``cause``")
    return {name: fault for name, (fault, _) in sorted(found.items())}


FAULTS.update(faults_in(import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)))
