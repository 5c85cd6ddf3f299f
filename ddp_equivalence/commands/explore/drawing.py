"""Draw random values and shrink them with Hypothesis. Only this module imports Hypothesis."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

from ddp_equivalence.case.errors import BadCase

try:
    import hypothesis
    from hypothesis import configuration, strategies
    from hypothesis.errors import NoSuchExample
except ImportError as error:
    raise BadCase(
        "explore",
        "no hypothesis",
        "an installed Hypothesis: pip install 'ddp_equivalence[explore]'",
    ) from error

__all__ = ["draw_different", "integer", "one_of", "shrink", "strategies"]

DRAWS_PER_VALUE = 60
"""The most draws for each value that is wanted. Many drawn values are refused, or were drawn
before."""

SHRINKING_SECONDS = 60.0
"""After this time the smallest case so far is taken. Without it, cases that hang could make a
search very long, because each takes its whole deadline."""

OFFSET = 3**50
"""Hypothesis draws every integer with this number added. Otherwise it would prefer small integers,
and constants that it finds in imported modules. It draws integers of this size evenly, and the same
ones whatever is imported."""

Value = TypeVar("Value", bound=Hashable)
Item = TypeVar("Item")


@cache
def _integers(least: int, most: int) -> strategies.SearchStrategy[int]:
    return strategies.integers(least, most)


def integer(draw: strategies.DrawFn, least: int, most: int) -> int:
    """An integer from ``least`` to ``most``, all equally likely; shrinks to ``least``."""
    return draw(_integers(OFFSET + least, OFFSET + most)) - OFFSET


def one_of(draw: strategies.DrawFn, items: Sequence[Item]) -> Item:
    """One of these items, all equally likely; shrinks to the first."""
    return items[integer(draw, 0, len(items) - 1)]


def draw_different(
    values: strategies.SearchStrategy[Value],
    wanted: int,
    seed: str,
    accept: Callable[[Value], bool] = lambda value: True,
) -> tuple[Value, ...]:
    """Draw ``wanted`` different values that are accepted, the same ones for the same seed.

    If there are fewer such values, or if they are rare, fewer are returned.
    """
    accepted: dict[Value, None] = {}

    def enough(value: Value) -> bool:
        if value not in accepted and len(accepted) < wanted and accept(value):
            accepted[value] = None
        return len(accepted) == wanted

    _find(values, enough, wanted, seed, shrinks=False)
    return tuple(accepted)


def shrink(
    values: strategies.SearchStrategy[Value],
    wanted: int,
    seed: str,
    known: Mapping[Value, bool],
    holds: Callable[[Value], bool],
    seconds: float = SHRINKING_SECONDS,
) -> Value | None:
    """Search for the smallest value for which ``holds``; None if it holds for no known value.

    ``known``: values, and whether each of them holds. The search draws what ``draw_different`` drew
    with the same arguments, up to the first value that is known to hold, and shrinks that value. It
    calls ``holds`` once for every new value, and no more after ``seconds``.
    """
    answers = dict(known)
    until = time.monotonic() + seconds
    held: list[Value] = []

    def answer(value: Value) -> bool:
        if value not in answers:
            if not held:
                return False
            answers[value] = time.monotonic() < until and holds(value)
        if answers[value]:
            held.append(value)
        return answers[value]

    return _find(values, answer, wanted, seed, shrinks=True)


def _find(
    values: strategies.SearchStrategy[Value],
    condition: Callable[[Value], bool],
    wanted: int,
    seed: str,
    shrinks: bool,
) -> Value | None:
    generate_phase, shrink_phase = hypothesis.Phase.generate, hypothesis.Phase.shrink
    settings = hypothesis.settings(
        # The draws depend on this number, so drawing and shrinking use the same.
        max_examples=DRAWS_PER_VALUE * wanted,
        database=None,
        deadline=None,
        phases=(generate_phase, shrink_phase) if shrinks else (generate_phase,),
    )
    # By default Hypothesis writes what it finds in imported modules to the working folder.
    home = Path(tempfile.gettempdir()) / f"ddp_equivalence-hypothesis-{os.getuid()}"
    configuration.set_hypothesis_home_dir(home)
    # Hypothesis logs that drawing is slow. This matters in tests only, and the search reports its
    # own progress.
    logging.getLogger("hypothesis").setLevel(logging.ERROR)
    try:
        return hypothesis.find(values, condition, settings=settings, random=Random(seed))
    except NoSuchExample:
        return None
