"""What is costly to know of an observed step that differs, computed when it is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.diagnosis.analysis import Analysis
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.draws import ReferenceDraws
from ddp_equivalence.diagnosis.localisation import Localisation
from ddp_equivalence.diagnosis.view import View, with_measurement
from ddp_equivalence.diagnosis.where.divergence import BesideOneRank
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.observed_scripts.recorded_step import GradientKind

MARKED = "> marks where the ranks part from one process that has all rows."


class AnalysisOfScript(Analysis):
    """An analysis of a step that no rank can run again, since it is a part of a script.

    ``kind``: which gradients are compared.
    """

    def __init__(self, request: Request, expected: Expected, kind: GradientKind) -> None:
        super().__init__(request, expected)
        self.kind = kind

    def compare_with(self, one_process: BesideOneRank | None) -> None:
        """Let the lines at which the ranks part from one process be among those that are shown."""
        self.beside = one_process

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All explanations of the difference, best first."""
        return self.explanations

    @property
    def order_matters(self) -> bool:
        """True if the script computes another gradient for its rows in another order."""
        return self._expected.rounding.order_matters

    @cached_property
    def localisation(self) -> Localisation:
        """As for a step; but one process is what the ranks are compared with, so that nothing is
        said of whether it is right.
        """
        found = super().localisation
        seen = found.whereabouts
        if seen is None or not seen.beside_one_rank:
            return found
        marks = MARKED if seen.marks else ""
        return replace(found, whereabouts=replace(seen, beside_one_rank="", marks=marks))

    @cached_property
    def draws(self) -> ReferenceDraws | None:
        """None: the script itself draws for its big batch what the ranks drew."""
        return None

    @cached_property
    def view_of_own_draws(self) -> View | None:
        """The view of the step. On one rank the script computes the big batch, by definition."""
        if self.measurement is None or self.why_no_view:
            return None
        view, other_bits = self._view_of_step(0), self.repeated is False
        seen = view and with_measurement(view, self.measurement, self.observed, 0, other_bits)
        return seen and replace(seen, factor_on_one_rank=lambda: 1.0)
