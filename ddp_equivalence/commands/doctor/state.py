"""What the doctor found out about one part of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """The word that is printed for it."""

    WORKS = "works"
    WRONG = "WRONG"
    FAILED = "FAILED"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class State:
    """One line of the doctor's table.

    ``outcome``: WORKS if all answers were right, WRONG if one was not, FAILED if there was none,
    NOT_RUN if the machine lacks what the question needs. ``text``: the answers in short, or the
    reason. ``error``: the whole error that ranks raised. ``timed_out``: they gave no answer in
    time.
    """

    name: str
    outcome: Outcome
    text: str
    error: str = ""
    timed_out: bool = False
