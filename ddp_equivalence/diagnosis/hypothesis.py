"""A hypothesis: an explanation with a prediction of what every rank would then hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ddp_equivalence.diagnosis.view import View


@dataclass(frozen=True)
class Way:
    """One way in which a cause can come about.

    ``predicted``: what the ranks would hold, shape (ranks, elements). ``detail`` says which ranks,
    micro-batches or numbers, as a clause.
    """

    predicted: Tensor
    detail: str = ""
    informed: bool = False
    """Partly taken from what was measured: believed only where nothing predicts it outright."""


@dataclass(frozen=True)
class Factor:
    """A number that the whole gradient may be multiplied by: ``detail`` says what it is."""

    value: float
    detail: str


@dataclass(frozen=True)
class Sign:
    """What the evidence says: ``speaks_for`` the cause, or against it, and ``because`` of what.

    ``decides``: it is believed without any number, where none is predicted.
    """

    speaks_for: bool
    because: str
    decides: bool = False


def _nothing(view: View) -> tuple[()]:
    return ()


def _silent(view: View) -> None:
    return None


@dataclass(frozen=True)
class Hypothesis:
    """One explanation.

    ``sentence`` says what happened, ``look_at`` where. ``predict(view)``: the ways in which it can
    come about; none where it cannot be the cause. ``factors(view)``: where the cause is a number
    times the right gradient; it may then come on top of another cause. ``sign(view)``: what the
    evidence says, None if nothing; without prediction a sign that speaks for it is believed where
    nothing predicts what was measured. ``plausible(view)``: neither, but the case has what it
    takes. ``tell_apart``: the case on which the numbers are its own. ``of_the_rule``: a wrong rule,
    which no limit may pass. ``comes_first``: where a
    sign speaks for it, what the gradients say no longer means what it would.
    """

    name: str
    sentence: str
    look_at: str
    predict: Callable[[View], Sequence[Way]] = _nothing
    factors: Callable[[View], Sequence[Factor]] = _nothing
    sign: Callable[[View], Sign | None] = _silent
    plausible: Callable[[View], bool] = lambda view: False
    tell_apart: str = ""
    of_the_rule: bool = False
    comes_first: bool = False
