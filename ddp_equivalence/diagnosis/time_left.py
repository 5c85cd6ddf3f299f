"""The time that explaining one difference may still take, and the progress shown meanwhile."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Computed = TypeVar("Computed")
Otherwise = TypeVar("Otherwise")

CAUSES = "known causes"
TWO_CAUSES = "two causes at once"
OBSERVED_CAUSES = "causes that were only observed"
BY_EXAMPLE = "shares by example"
BY_RANK = "shares by rank"
DIVISORS = "what losses are divided by"
WHEREABOUTS = "where the difference is"
NEAREST = "nearest known fault"
EDITS = "edits of the step"
DRAWS = "the big batch with the random numbers of the ranks"
"""The parts of an explanation, as a report names those that there was no time for."""

SILENT_SECONDS = 2.0
"""Progress is shown once this many seconds were spent, and then again after as many more."""

LEAST_SECONDS = 1.0
"""An explanation may take this long even if nothing is left of the case's deadline."""


class OutOfTime(Exception):
    """What is left of the case's deadline is not enough for the next computation."""


class TimeLeft:
    """Counts the seconds that are spent on an explanation, whenever it is asked for.

    ``deadline``: the case's deadline in seconds. ``seconds``: what the ranks have left of it. Only
    the time inside ``counted`` counts, since a report may be printed long after the check.
    """

    def __init__(self, seconds: float = math.inf, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._allowed = max(seconds, LEAST_SECONDS)
        self._spent = 0.0
        self._resumed: float | None = None
        self._longest: dict[int, float] = {}
        self._part = self._detail = ""
        self._shown_at, self._ends = 0.0, self._allowed
        self._not_tried: dict[str, str] = {}

    @classmethod
    def since(cls, started: float, deadline: float) -> TimeLeft:
        """What a check that started at this time has left of its deadline, in seconds."""
        return cls(deadline - (time.monotonic() - started), deadline)

    @property
    def not_tried(self) -> tuple[str, ...]:
        """The parts that there was no time for, in words."""
        return tuple(
            f"{part} ({detail})" if detail else part for part, detail in self._not_tried.items()
        )

    def has_left_out(self, part: str) -> bool:
        """True if there was no time for this part, or not for all of it."""
        return part in self._not_tried

    def leave_out(self, part: str, detail: str = "") -> None:
        """Note that there is no time for this part. ``detail`` says how much of it was tried."""
        self._not_tried[part] = detail or self._not_tried.get(part, "")

    @contextmanager
    def counted(self, part: str, most: float = math.inf) -> Iterator[None]:
        """Count the time of the block, which computes this part, in so many seconds at most.
        Blocks may be nested.
        """
        outer = self._resumed, self._part, self._ends
        self._part, self._detail = part, ""
        self._ends = min(self._allowed, self._spent_until_now() + most)
        if outer[0] is None:
            self._resumed = time.monotonic()
        try:
            yield
        finally:
            if outer[0] is None:
                self._spent, self._resumed = self._spent_until_now(), None
            (_, self._part, self._ends), self._detail = outer, ""

    @contextmanager
    def unless_out(self, part: str) -> Iterator[None]:
        """Leave the block, and note the part, once there is no time for what is computed next."""
        try:
            yield
        except OutOfTime:
            self.leave_out(part)

    def within(
        self, part: str, compute: Callable[[], Computed], otherwise: Otherwise
    ) -> Computed | Otherwise:
        """What ``compute()`` returns; ``otherwise`` if there is no time for it, which is noted."""
        with self.counted(part):
            try:
                return compute()
            except OutOfTime:
                self.leave_out(part)
                return otherwise

    @property
    def seconds(self) -> float:
        """How many are left; infinite without a deadline."""
        return self._allowed - self._spent_until_now()

    def require(self, seconds: float = 0.0) -> None:
        """Raises OutOfTime unless more than this many seconds are left."""
        if self.seconds <= seconds:
            raise OutOfTime

    @contextmanager
    def gradient(self, examples: int) -> Iterator[None]:
        """The block computes the gradient of so many examples.

        Raises OutOfTime if that may take too long. It is taken to be as costly as a gradient of
        fewer examples was, and in proportion to a gradient of more.
        """
        costs = (
            seconds * min(1.0, examples / max(1, count)) for count, seconds in self._longest.items()
        )
        self.require(max(costs, default=0.0))
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._longest[examples] = max(seconds, self._longest.get(examples, 0.0))
            self.show(self._detail)

    def show(self, detail: str) -> None:
        """Show how far the part is, if the explanation takes long; ``detail``: "3 of 9 modules"."""
        self._detail = detail
        spent = self._spent_until_now()
        if spent < self._shown_at + SILENT_SECONDS:
            return
        self._shown_at = spent
        most = f" of at most {self._ends:.0f}" if math.isfinite(self._ends) else ""
        what = f"{self._part}, {detail}" if detail else self._part
        _showers[-1](f"explaining the difference: {what} ({spent:.0f}{most} s)")

    def _spent_until_now(self) -> float:
        if self._resumed is None:
            return self._spent
        return self._spent + time.monotonic() - self._resumed


Shower = Callable[[str], None]
"""Shows a line of progress to whoever waits."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


_showers: list[Shower] = [_to_stderr]


@contextmanager
def progress_shown_by(shower: Shower) -> Iterator[None]:
    """Inside the block, ``shower`` shows lines of progress; elsewhere they go to stderr."""
    _showers.append(shower)
    try:
        yield
    finally:
        _showers.remove(shower)
