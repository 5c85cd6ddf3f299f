"""The verdict of one check: frozen data, and the report that it prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.steps import Compare
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.analysis import Surroundings
from ddp_equivalence.diagnosis.divisors import Divisors, find_divisors
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.localisation import Localisation, localise
from ddp_equivalence.diagnosis.nearest_fault import NearestFault
from ddp_equivalence.diagnosis.shares import Shares, shares_of
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.on_rank import Evidence
from ddp_equivalence.measurement.rerun import SecondLook
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.report import render

Outcome = Literal["same", "different", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """What a check found. ``print(verdict)`` is the report that a failing test shows.

    ``outcome``: "same", "different" or "unknown" (then ``reason`` says why nothing was shown).
    ``cause``: the public name of the accepted explanation, or None; ``causes``: where it takes two.
    ``findings``: all explanations considered, best first. ``comparison``: per parameter and rank.
    ``evidence``: rank -> what really ran; ``observed``: rank -> what a closer look at a second run
    saw, ``repeated``: whether that left the same bits (None if not known). ``planted``: the fault
    that was planted.
    ``failure``: the ranks' failure, if they failed. ``second_look``: what a second try on fresh
    ranks showed, where the first one hung or was aborted. ``output``: rank -> what it printed.
    ``changed``: rank -> what the step changed in its process, or left running there.
    """

    case: Case
    subject: str
    promise: str
    lane: Lane
    outcome: Outcome
    reason: str = ""
    cause: str | None = None
    findings: tuple[Finding, ...] = ()
    comparison: Comparison | None = None
    evidence: Mapping[int, Evidence] = field(default_factory=dict)
    observed: Mapping[int, Observation] = field(default_factory=dict)
    repeated: bool | None = None
    planted: str = ""
    examples: tuple[int, ...] = ()
    compare: Compare = "gradients"
    lr: float = 0.1
    failure: RankFailed | None = None
    output: Mapping[int, str] = field(default_factory=dict)
    changed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    second_look: SecondLook | None = None
    seconds: float = 0.0
    repeat: str = ""
    around: Surroundings | None = field(default=None, repr=False, compare=False)
    view: View | None = field(default=None, repr=False, compare=False)
    no_view: str = field(default="", repr=False, compare=False)
    _of_weights: Mapping[str, float] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return render(self)

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all causes that it takes to explain what was measured."""
        first = self.findings[0] if self.findings else None
        return first.causes if first is not None and first.accepted else ()

    @property
    def shares(self) -> Shares | None:
        """How often each example entered what each rank holds; computed when asked for."""
        found = self._shares_or_why
        return None if isinstance(found, str) else found

    @property
    def why_no_shares(self) -> str:
        """Why there are none, in words; "" if there are."""
        found = self._shares_or_why
        return found if isinstance(found, str) else ""

    @cached_property
    def _shares_or_why(self) -> Shares | str:
        return self.no_view if self.view is None else shares_of(self.view)

    @cached_property
    def divisors(self) -> Divisors | None:
        """The divisors of the ranks' losses, of the reduction and of the big batch, if known."""
        return None if self.view is None else find_divisors(self.view)

    @cached_property
    def localisation(self) -> Localisation:
        """Where the difference lies, beside its cause; computed when asked for."""
        if self.view is None or self.comparison is None:
            return Localisation(weight_multiples=self._of_weights)
        return localise(self.view, self.comparison, has_cause=self.cause is not None)

    @property
    def nearest(self) -> NearestFault | None:
        """The known fault that would be hardest to see on this case, and how far away it lies.

        Computed when asked for; None where the model is too large to tell.
        """
        compared = self.comparison is not None and self.around is not None
        return self.around.nearest if compared and self.around else None

    @property
    def error(self) -> float | None:
        """||measured - big batch|| / ||big batch|| of the parameter nearest to, or furthest
        beyond, its limit, on its worst rank.
        """
        worst = self.comparison.worst if self.comparison else None
        return worst.error if worst else None

    @property
    def floor(self) -> float | None:
        """What rounding alone does to that parameter on one device.

        Measured when asked for, if the verdict did not depend on it; None where the model is too
        large to be kept for that.
        """
        worst = self.comparison.worst if self.comparison else None
        if worst is None or self.around is None:
            return None
        return worst.limit.floor or self.around.floor_of(worst)

    @property
    def limit(self) -> float | None:
        """The limit of that parameter."""
        worst = self.comparison.worst if self.comparison else None
        return worst.limit.relative if worst else None
