"""A hypothesis: one explanation of a difference, which predicts what every rank would hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View


@dataclass(frozen=True)
class Prediction:
    """What the ranks would hold if a cause had come about in one particular way.

    ``by_rank``: shape (reporting ranks, elements). ``detail``: the ranks, micro-batches or numbers
    that the prediction is about, as a clause of the report. ``fitted``: some numbers of the
    prediction were taken from the measurement. It is then believed only if no other one fits.
    """

    by_rank: Tensor
    detail: str = ""
    fitted: bool = False


@dataclass(frozen=True)
class WrongFactor:
    """A number that the right gradient may have been multiplied by. ``detail`` says what it is."""

    value: float
    detail: str


@dataclass(frozen=True)
class Indication:
    """What the observations say about a cause.

    ``supports``: True if they speak for the cause, False if they speak against it. ``because``:
    what was observed, as a clause of the report. ``conclusive``: True if the cause is believed even
    without a prediction that fits, unless a prediction of another cause fits.
    """

    supports: bool
    because: str
    conclusive: bool = False


@dataclass(frozen=True)
class Words:
    """What a report says of a cause that it believes: the ``sentence``, and the ``headline``.

    ``is_guess``: the numbers fit, and nothing of the cause was seen.
    """

    sentence: str
    headline: str
    is_guess: bool = False


def _no_predictions(view: View) -> tuple[()]:
    return ()


def _no_indication(view: View) -> None:
    return None


def _usual_words(view: View) -> None:
    return None


def _no_fix(view: View) -> str:
    return ""


def _no_lines(view: View) -> tuple[()]:
    return ()


@dataclass(frozen=True)
class Hypothesis:
    """One explanation of a difference.

    ``sentence`` says what happened, ``look_at`` where in the code to look. ``tell_apart``: the
    change of the case after which no other cause leaves the same numbers.

    ``predict(view)``: what the ranks would hold, for each way in which the cause can come about;
    empty where it cannot be the cause. ``factors(view)``: the numbers that this cause may multiply
    the right gradient by; empty if it does something else. A cause with factors can come together
    with another cause. ``indication(view)``: what the observations say about the cause; None if
    they say nothing.

    ``headline``: the sentence in at most seven words, in lower case, as the first line of a report
    has it. ``fix``: what to write instead, as an imperative on one line. ``lines(view)``: at most
    three lines of the user's code that show what happened, in the order in which they ran; they are
    asked for only if the cause is believed. ``words(view)``: what to say instead of the sentence
    and the headline, where less was seen than these say; None if they are true.

    ``limits_must_catch``: the limits of every comparison must be narrow enough to catch what
    ``predict`` gives.
    ``invalidates_gradients``: where an indication supports this cause, the gradients of the ranks
    cannot be compared with any prediction, and no other cause is considered.
    """

    name: str
    sentence: str
    look_at: str
    predict: Callable[[View], Sequence[Prediction]] = _no_predictions
    factors: Callable[[View], Sequence[WrongFactor]] = _no_predictions
    indication: Callable[[View], Indication | None] = _no_indication
    tell_apart: str = ""
    headline: str = ""
    fix: Callable[[View], str] = _no_fix
    lines: Callable[[View], Sequence[PointedLine]] = _no_lines
    words: Callable[[View], Words | None] = _usual_words
    limits_must_catch: bool = False
    invalidates_gradients: bool = False
