"""Does data-parallel training compute the gradients of one big batch? Settled by running it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.case.case import Case
    from ddp_equivalence.case.errors import BadCase, SuiteBug
    from ddp_equivalence.check_equivalence import assert_equivalent, check
    from ddp_equivalence.faults.plant import planted
    from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
    from ddp_equivalence.ranks.rank import Rank
    from ddp_equivalence.report.errors import NotEquivalent, NothingCompared
    from ddp_equivalence.report.verdict import Verdict

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

_MODULE_OF = {
    "BadCase": "case.errors",
    "Case": "case.case",
    "NotEquivalent": "report.errors",
    "NothingCompared": "report.errors",
    "Rank": "ranks.rank",
    "RankFailed": "ranks.failure",
    "RanksTimedOut": "ranks.failure",
    "SuiteBug": "case.errors",
    "Verdict": "report.verdict",
    "assert_equivalent": "check_equivalence",
    "check": "check_equivalence",
    "planted": "faults.plant",
}


def __getattr__(name: str) -> object:
    # On first use: pytest imports the plugin in every run, and torch is needed in few of them.
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
