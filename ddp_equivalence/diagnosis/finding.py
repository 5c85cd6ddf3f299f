"""A finding: one explanation, compared with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_equivalence.diagnosis.hypothesis import Hypothesis
from ddp_equivalence.diagnosis.pointed_line import PointedLine


@dataclass(frozen=True)
class Finding:
    """One explanation and what it leaves unexplained: ||measured - predicted|| / ||measured||.

    ``cause``: its public name. ``sentence``: what happened. ``look_at``: where in the code to look.
    ``unexplained`` is None where nothing could be predicted. ``accepted``: this explanation is
    believed. ``fits``: its numbers agree with the measurement; it is not accepted if a better
    explanation fits too. ``would_show``: False where this cause leaves the big batch's gradient on
    this case.

    ``detail``: the ranks, numbers or micro-batches that it is about, as a clause of the report.
    ``fitted``: some numbers of the prediction were taken from the measurement. ``because``: what
    was observed for or against the cause. ``refuted``: this observation speaks against it.
    ``tell_apart``: the change of the case after which no other cause leaves the same numbers.
    ``more``: the other causes, where only several together explain the measurement. They bring
    their sentence and the place to look; all else stands in the first one.

    ``headline``: the sentence in a few words. ``fix``: what to write instead, on one line.
    ``lines``: the lines of the user's code that show what happened. Both are given only where the
    explanation is believed. ``is_guess``: its lines show no more than what the step does; that one
    of them is wrong is told by the numbers alone. ``besides``: a factor that all gradients have
    besides, which the cause does not explain; None without one.
    """

    cause: str
    sentence: str
    look_at: str
    unexplained: float | None = None
    accepted: bool = False
    would_show: bool = True
    fits: bool = False
    detail: str = ""
    because: str = ""
    refuted: bool = False
    tell_apart: str = ""
    fitted: bool = False
    more: tuple[Finding, ...] = ()
    headline: str = ""
    fix: str = ""
    lines: tuple[PointedLine, ...] = ()
    is_guess: bool = False
    besides: float | None = None

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all causes that it takes to explain the measurement."""
        return (self.cause, *(one.cause for one in self.more))

    @property
    def explains(self) -> bool:
        """True if the numbers fit and no observation speaks against the cause."""
        return self.fits and not self.refuted


def finding_without_prediction(hypothesis: Hypothesis) -> Finding:
    """A finding with the texts of the hypothesis, before anything is predicted or accepted."""
    return Finding(
        cause=hypothesis.name,
        sentence=hypothesis.sentence,
        look_at=hypothesis.look_at,
        tell_apart=hypothesis.tell_apart,
        headline=hypothesis.headline,
    )


def finding_from_observation(hypothesis: Hypothesis, because: str = "") -> Finding:
    """A finding that fits by observation, or because the case makes it likely; no prediction."""
    return replace(finding_without_prediction(hypothesis), fits=True, because=because)


def finding_of_wrong_collectives(wrong: Sequence[str]) -> Finding:
    """The finding that collectives give wrong answers. It comes before every cause in the step.

    ``wrong``: the wrong answers, as phrases.
    """
    return Finding(
        cause="collective_wrong",
        sentence="The collectives themselves give wrong answers here, whatever the step does.",
        look_at="the backend and its library, before the step: ddp-equivalence doctor tests them",
        accepted=True,
        fits=True,
        headline="the collectives themselves answer wrongly",
        fix="repair the backend, not the step: run ddp-equivalence doctor.",
        because="; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
    )
