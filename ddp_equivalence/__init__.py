"""Check that data-parallel training computes the gradients of one big batch, by running both."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.case.case import Case
    from ddp_equivalence.case.errors import BadCase, SuiteBug
    from ddp_equivalence.checking.check import assert_equivalent, check
    from ddp_equivalence.faults.plant import planted
    from ddp_equivalence.observed_scripts.report import Observed
    from ddp_equivalence.observed_scripts.script_observation import observe
    from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
    from ddp_equivalence.ranks.rank import Rank
    from ddp_equivalence.report.verdict import NotEquivalent, NothingCompared, Verdict

__all__ = [
    "BadCase",
    "Case",
    "NotEquivalent",
    "NothingCompared",
    "Observed",
    "Rank",
    "RankFailed",
    "RanksTimedOut",
    "SuiteBug",
    "Verdict",
    "assert_equivalent",
    "check",
    "observe",
    "planted",
]

_MODULE_OF = {
    "BadCase": "case.errors",
    "Case": "case.case",
    "NotEquivalent": "report.verdict",
    "NothingCompared": "report.verdict",
    "Observed": "observed_scripts.report",
    "Rank": "ranks.rank",
    "RankFailed": "ranks.failure",
    "RanksTimedOut": "ranks.failure",
    "SuiteBug": "case.errors",
    "Verdict": "report.verdict",
    "assert_equivalent": "checking.check",
    "check": "checking.check",
    "observe": "observed_scripts.script_observation",
    "planted": "faults.plant",
}


_PUBLIC_MODULES = {"explain": "commands.explain", "reproduction": "report.script"}
"""The short names of public modules, and the modules in subfolders that they stand for."""


class _Alias(ModuleType):
    """Stands for a public module under its short name. The first use imports the real module."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = _PUBLIC_MODULES[self.__name__.rpartition(".")[2]]
        return getattr(import_module(f"{__name__}.{path}"), name)


for _name in _PUBLIC_MODULES:
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Alias(f"{__name__}.{_name}")


def __getattr__(name: str) -> object:
    # Names are imported on first use: pytest imports the plugin in every run, and few runs need
    # torch.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULE_OF[name]}")
    except AttributeError as error:  # Python would only say that the name cannot be imported
        raise ImportError(f"{_MODULE_OF[name]} cannot be imported: {error}") from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value
