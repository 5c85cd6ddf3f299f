"""The errors that carry a verdict that is not "same"."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict


class NotEquivalent(AssertionError):
    """The subject does not compute the gradients of one big batch; ``.verdict`` says how."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))


class NothingCompared(AssertionError):
    """Nothing was compared, so nothing was shown; ``.verdict`` says why."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(str(verdict))
