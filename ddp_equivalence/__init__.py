"""Does data-parallel training compute the gradients of one big batch? Settled by running it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.case import Case
    from ddp_equivalence.errors import (
        BadCase,
        NotEquivalent,
        NothingCompared,
        RankFailed,
        RanksTimedOut,
        SuiteBug,
    )
    from ddp_equivalence.faults.plant import planted
    from ddp_equivalence.ranks.rank import Rank
    from ddp_equivalence.verdict import Verdict, assert_equivalent, check

__all__ = [
    "BadCase",
    "Case",
    "NotEquivalent",
    "NothingCompared",
    "Rank",
    "RankFailed",
    "RanksTimedOut",
    "SuiteBug",
    "Verdict",
    "assert_equivalent",
    "check",
    "planted",
]

_HOME = {"Case": "case", "Rank": "ranks.rank", "check": "verdict", "planted": "faults.plant"}
_HOME |= dict.fromkeys(("Verdict", "assert_equivalent"), "verdict")


def __getattr__(name: str) -> object:
    # On first use: pytest imports the plugin in every run, and torch is needed in few of them.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value
