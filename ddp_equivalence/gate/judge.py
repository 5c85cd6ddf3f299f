"""Holds one record against another: what has changed, and whether that is red."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain

from ddp_equivalence.gate.finding import LEVELS, Finding, Level
from ddp_equivalence.gate.history import with_history, with_noise_of
from ddp_equivalence.gate.policy import Policy
from ddp_equivalence.gate.recorded import Recorded
from ddp_equivalence.gate.rules_of_checks import changed_checks, name_of_check
from ddp_equivalence.gate.rules_of_surroundings import changed_surroundings, other_checks
from ddp_equivalence.gate.rules_of_tests import changed_tests


@dataclass(frozen=True)
class Judgement:
    """``findings``: the worst first. ``compared``: how many checks both records have."""

    old: Recorded
    new: Recorded
    findings: tuple[Finding, ...]
    compared: int

    def name_of(self, test: str, number: int) -> str:
        """How findings name a check: a test may make several."""
        return name_of_check(self.old, test, number)

    @property
    def level(self) -> Level:
        """The worst of all; "information" if nothing is red or yellow."""
        found = {one.level for one in self.findings}
        return next((one for one in ("red", "yellow") if one in found), "information")

    @property
    def counts(self) -> Counter[Level]:
        """How many findings each level has."""
        return Counter(one.level for one in self.findings)


def judge(
    old: Recorded, new: Recorded, policy: Policy, today: date, earlier: Sequence[Recorded] = ()
) -> Judgement:
    """Hold ``new`` against ``old``. ``earlier``: records that were made before ``old``, the first
    of all first. They show how much errors and times vary, and what was stable.
    """
    usual = with_noise_of(earlier, old)
    found = chain(
        changed_checks(usual, new, policy.ratios),
        changed_tests(usual, new, policy.ratios),
        changed_surroundings(old, new),
        other_checks(old, new),
    )
    seen = with_history(found, earlier, old)
    findings = sorted(policy.judged(seen, today), key=lambda one: LEVELS.index(one.level))
    return Judgement(old, new, tuple(findings), len(old.checks.keys() & new.checks.keys()))
