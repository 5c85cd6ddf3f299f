"""Rank the explanations by how much of the measured gradients each leaves unexplained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Way
from ddp_equivalence.diagnosis.view import NEAR, View, near, unexplained

LEAST_ACCEPTED = 1e-10
"""What a right explanation may leave unexplained in float64: its own rounding."""

MOST_ACCEPTED = 0.3
"""An explanation that leaves more is none, however coarse the precision."""

MOST_OF_DIFFERENCE = 0.5
"""An explanation must explain at least half of the difference, however small that is."""

AS_GOOD = 2.0
"""An explanation that leaves no more than twice the best one's rest is as good: rounding."""

ROUNDING = 8.0
"""And so is one that leaves no more than this, in eps of the case's type."""


@dataclass(frozen=True)
class Finding:
    """One explanation and what it leaves unexplained: ||measured - predicted|| / ||measured||.

    ``unexplained`` is None where no prediction was possible. ``shows`` is False where this fault
    would leave the big batch's gradient on this case. ``fits``: the numbers are those predicted;
    ``accepted``: and nothing is believed before it. ``detail``: which rank, number, micro-batch.
    ``because``: what the evidence says; ``refuted``: it speaks against the cause. ``second``: the
    cause that comes on top, where it takes two to explain what was measured.
    """

    cause: str
    sentence: str
    look_at: str
    unexplained: float | None
    accepted: bool
    shows: bool = True
    fits: bool = False
    detail: str = ""
    because: str = ""
    refuted: bool = False
    tell_apart: str = ""
    informed: bool = False
    second: str = ""

    @property
    def causes(self) -> tuple[str, ...]:
        """The names of all causes that this explanation takes."""
        return (self.cause, self.second) if self.second else (self.cause,)


@dataclass(frozen=True)
class NearestFault:
    """The planted fault that would be hardest to see here: ||predicted - expected||, relative."""

    cause: str
    distance: float


def diagnose(view: View, comparison: Comparison) -> tuple[Finding, ...]:
    """All explanations of what ``view.measured`` holds, best first; accepted first ones are named.

    One cause explains before two do, two before a sign without numbers, that before a mere guess.
    """
    accepted = _accepted(view, comparison)
    first = [
        replace(_finding(one), fits=True, accepted=True, because=sign.because)
        for one in HYPOTHESES
        if one.comes_first and (sign := one.sign(view)) is not None and sign.speaks_for
    ]
    if first:
        return tuple(first)
    found = [one for one in (_judge(h, view, accepted) for h in HYPOTHESES) if one is not None]
    if not any(one.fits and not one.refuted for one in found):
        found += _two_at_once(view, accepted)
    if not any(one.fits and not one.refuted for one in found):
        found = _believe(view, found, comparison)
    return _ranked(found, ROUNDING * torch.finfo(view.dtype).eps)


def nearest_fault(view: View) -> NearestFault | None:
    """The wrong rule whose prediction lies nearest to the big batch without being it."""
    size = float(view.expected.norm())
    best = None
    for one in HYPOTHESES:
        for way in one.predict(view) if one.of_the_rule and size > 0 else ():
            # One wrong rank is enough to be seen.
            distance = float((way.predicted - view.expected).norm(dim=1).max()) / size
            if distance > NEAR and (best is None or distance < best.distance):
                best = NearestFault(one.name, distance)
    return best


def _accepted(view: View, comparison: Comparison) -> float:
    """What an explanation may leave: the limit of all parameters together, as one vector."""
    limits = sum(one.limit.absolute**2 for one in comparison.parameters)
    norms = sum(one.norm**2 for one in comparison.parameters)
    limit = (limits / norms) ** 0.5 if norms > 0 else 0.0
    difference = unexplained(view.measured, view.everywhere(view.expected))
    most = max(LEAST_ACCEPTED, min(4 * limit, MOST_ACCEPTED))
    return min(most, MOST_OF_DIFFERENCE * difference)


def _judge(one: Hypothesis, view: View, accepted: float) -> Finding | None:
    ways = [*one.predict(view), *_multiples(one.factors(view), view)]
    sign = one.sign(view)
    if not ways:
        return None
    right = view.everywhere(view.expected)
    shows = any(not near(way.predicted, right) for way in ways)
    rests = [unexplained(view.measured, way.predicted) for way in ways]
    # A prediction that owes nothing to what was measured counts more.
    outright = [r for r, way in zip(rests, ways, strict=True) if not way.informed]
    rest = min(rests) if min(outright, default=accepted + 1) > accepted else min(outright)
    best = ways[rests.index(rest)]
    # Two explanations that differ by rounding only fit equally well.
    rest = 0.0 if rest < LEAST_ACCEPTED / 10 else rest
    return replace(
        _finding(one),
        unexplained=rest,
        shows=shows,
        fits=shows and rest <= accepted,
        detail=best.detail,
        informed=best.informed,
        because=sign.because if sign else "",
        refuted=sign is not None and not sign.speaks_for,
    )


def _finding(one: Hypothesis) -> Finding:
    return Finding(
        one.name, one.sentence, one.look_at, None, accepted=False, tell_apart=one.tell_apart
    )


def _multiples(factors: Sequence[Factor], view: View) -> Iterator[Way]:
    for factor in factors:
        wrong = view.everywhere(factor.value * view.expected)
        yield Way(wrong, factor.detail)
        if view.only_some_differ:
            mixed = view.mix(wrong, view.everywhere(view.expected), view.differing)
            yield Way(mixed, f"{factor.detail}, of some parameters only")


def _two_at_once(view: View, accepted: float) -> list[Finding]:
    """A cause that predicts all but a factor, and another that is this factor."""
    by_factor = [(h, factor) for h in HYPOTHESES for factor in h.factors(view)]
    found = []
    for one in HYPOTHESES:
        sign = one.sign(view)
        if sign is not None and not sign.speaks_for:
            continue
        for way in one.predict(view):
            if way.informed:
                continue
            factor = _factor(view.measured, way.predicted)
            right = view.everywhere(view.expected)
            if factor is None or near(way.predicted, right):
                continue
            if near(factor * way.predicted, right):
                continue  # two that cancel explain nothing
            rest = unexplained(view.measured, factor * way.predicted)
            if rest > accepted:
                continue
            for other, named in by_factor:
                against = other.sign(view)
                if other.name == one.name or (against is not None and not against.speaks_for):
                    continue
                if abs(factor / named.value - 1) <= max(NEAR, accepted):
                    details = "; ".join(filter(None, (way.detail, named.detail)))
                    found.append(
                        replace(
                            _finding(one),
                            sentence=f"Two causes at once. {one.sentence} And: {other.sentence}",
                            look_at=f"{one.look_at}; and {other.look_at}",
                            unexplained=rest if rest > LEAST_ACCEPTED / 10 else 0.0,
                            fits=True,
                            detail=details,
                            because=sign.because if sign else "",
                            second=other.name,
                        )
                    )
    return list({one.causes: one for one in reversed(found)}.values())[::-1]


def _factor(measured: Tensor, predicted: Tensor) -> float | None:
    """The k for which k times the prediction is nearest to what was measured."""
    size = float((predicted * predicted).sum())
    product = float((measured * predicted).sum())
    return product / size if size > 0 and product == product else None


def _believe(view: View, found: list[Finding], comparison: Comparison) -> list[Finding]:
    """What no number predicts, but the evidence says, or the case has what it takes for."""
    for one in HYPOTHESES:
        sign = one.sign(view)
        if sign is not None and sign.speaks_for and sign.decides:
            others = [other for other in found if other.cause != one.name]
            return [*others, replace(_finding(one), fits=True, because=sign.because)]
    for one in HYPOTHESES:
        if comparison.ranks_agree and one.plausible(view):
            others = [other for other in found if other.cause != one.name]
            return [*others, replace(_finding(one), fits=True)]
    return found


def _ranked(found: list[Finding], rounding: float) -> tuple[Finding, ...]:
    fitting = [one for one in found if one.fits and not one.refuted]
    first = min(
        (
            [one for one in fitting if bool(one.because) is told and one.informed is informed]
            for told, informed in ((True, False), (True, True), (False, False), (False, True))
        ),
        key=lambda some: not some,
    )
    best = min((one.unexplained or 0.0 for one in first), default=0.0)
    most = max(AS_GOOD * best, rounding, LEAST_ACCEPTED)
    accepted = {id(one) for one in first if (one.unexplained or 0.0) <= most}
    ranked = [replace(one, accepted=id(one) in accepted) for one in found]
    # Sorting keeps the order in which equally good ones are believed.
    return tuple(
        sorted(
            ranked,
            key=lambda one: (
                not one.accepted,
                not one.fits,
                0.0 if one.accepted else _size(one.unexplained),
            ),
        )
    )


def _size(value: float | None) -> float:
    return float("inf") if value is None else value
