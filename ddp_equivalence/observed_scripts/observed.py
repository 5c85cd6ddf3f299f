"""What ``observe`` returns."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from ddp_equivalence.check_equivalence import raise_unless_same
from ddp_equivalence.observed_scripts.step_facts import StepFacts
from ddp_equivalence.report.encoding import encodable
from ddp_equivalence.report.verdict import Outcome, Verdict


@dataclass(frozen=True)
class Observed:
    """``name``: of the script. ``verdicts``: one for each recorded step, and ``facts`` of each.

    ``command``, ``one_process``: what ran on the ranks and in one process. ``seconds``: what both
    took. ``float64``: the script computed in float64. ``on_cpu``: its CUDA devices were the CPU.
    ``notes``: what a reader must know beside the verdicts. ``ending``: a verdict on the script as a
    whole, if it hung or failed before it had made all steps that were asked for.
    ``draws_alike``: the lines at which all ranks drew the same random numbers for their rows.
    ``render``: writes the report; with True, everything.
    """

    name: str
    verdicts: tuple[Verdict, ...]
    facts: tuple[StepFacts, ...]
    command: tuple[str, ...]
    one_process: tuple[str, ...]
    world_size: int
    seconds: tuple[float, float]
    float64: bool
    on_cpu: bool
    notes: tuple[str, ...]
    render: Callable[[Observed, bool], str] = field(repr=False, compare=False)
    ending: Verdict | None = None
    draws_alike: tuple[str, ...] = ()

    @property
    def all_verdicts(self) -> tuple[Verdict, ...]:
        """Those on the steps, and that on the ending if there is one."""
        return self.verdicts if self.ending is None else (*self.verdicts, self.ending)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes no step wrong, and is seldom meant."""
        if not self.draws_alike:
            return ()
        return (
            "every rank draws the same random numbers for its rows, such as masks of dropout or "
            f"noise: at {', '.join(self.draws_alike)}. If that is not meant, seed each rank by its "
            "number after the model is made: torch.manual_seed(seed + rank)"
            "  [dropout_same_on_all_ranks]",
        )

    @property
    def verdict(self) -> Verdict:
        """That of the first step that is different; else of the first that is unknown; else of the
        last one.
        """
        for outcome in ("different", "unknown"):
            for verdict in self.all_verdicts:
                if verdict.outcome == outcome:
                    return verdict
        return self.verdicts[-1]

    @property
    def outcome(self) -> Outcome:
        """The outcome of that verdict."""
        return self.verdict.outcome

    @property
    def cause(self) -> str | None:
        """The cause of that verdict."""
        return self.verdict.cause

    def __str__(self) -> str:
        return encodable(self.render(self, False), sys.stdout)

    def full_report(self) -> str:
        """Everything that is known of every step."""
        return encodable(self.render(self, True), sys.stdout)

    def assert_equivalent(self) -> Observed:
        """Raises NotEquivalent or NothingCompared, unless every step is the same."""
        __tracebackhide__ = True
        raise_unless_same(self.verdict)
        return self
