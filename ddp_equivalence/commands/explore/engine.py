"""Draw values and shrink them with Hypothesis: everything of it that the search relies on."""

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

__all__ = ["draw", "number", "one_of", "smallest", "strategies"]

DRAWS_FOR_EACH = 60
"""How often is drawn for each value that is wanted: most draws may be refused, or known already."""

SHRINKING = 60.0
"""Seconds from which on the smallest case so far will do: a hanging case takes its deadline."""

FAR = 3**50
"""Hypothesis mixes constants of the modules that are loaded into its integers, and prefers small
ones. Up here it knows none and draws evenly, the same numbers wherever it runs."""

Value = TypeVar("Value", bound=Hashable)
Item = TypeVar("Item")


@cache
def _integers(least: int, most: int) -> strategies.SearchStrategy[int]:
    return strategies.integers(least, most)


def number(draw: strategies.DrawFn, least: int, most: int) -> int:
    """An integer from ``least`` to ``most``, all equally likely; shrinks to ``least``."""
    return draw(_integers(FAR + least, FAR + most)) - FAR


def one_of(draw: strategies.DrawFn, values: Sequence[Item]) -> Item:
    """One of these values, all equally likely; shrinks to the first."""
    return values[number(draw, 0, len(values) - 1)]


def draw(
    values: strategies.SearchStrategy[Value],
    wanted: int,
    seed: str,
    accept: Callable[[Value], bool] = lambda value: True,
) -> tuple[Value, ...]:
    """At most ``wanted`` different values that are accepted, the same ones for the same seed.

    Fewer where there are no more of them, or they are too rare to be met.
    """
    found: dict[Value, None] = {}

    def enough(value: Value) -> bool:
        if value not in found and len(found) < wanted and accept(value):
            found[value] = None
        return len(found) == wanted

    _find(values, enough, wanted, seed, shrinks=False)
    return tuple(found)


def smallest(
    values: strategies.SearchStrategy[Value],
    wanted: int,
    seed: str,
    known: Mapping[Value, bool],
    holds: Callable[[Value], bool],
    seconds: float = SHRINKING,
) -> Value | None:
    """The smallest value found for which ``holds``; None if it holds for none that is ``known``.

    Draws what ``draw`` drew with the same arguments, up to the first value known to hold, and
    shrinks that one. ``holds`` is asked once for every value; after ``seconds`` no more.
    """
    answers = dict(known)
    until = time.monotonic() + seconds
    shrinking: list[Value] = []

    def answer(value: Value) -> bool:
        if value not in answers:
            if not shrinking:
                return False
            answers[value] = time.monotonic() < until and holds(value)
        if answers[value]:
            shrinking.append(value)
        return answers[value]

    return _find(values, answer, wanted, seed, shrinks=True)


def _find(
    values: strategies.SearchStrategy[Value],
    condition: Callable[[Value], bool],
    wanted: int,
    seed: str,
    shrinks: bool,
) -> Value | None:
    generate, shrink = hypothesis.Phase.generate, hypothesis.Phase.shrink
    settings = hypothesis.settings(
        # The same in both uses: how Hypothesis draws depends on it.
        max_examples=DRAWS_FOR_EACH * wanted,
        database=None,
        deadline=None,
        phases=(generate, shrink) if shrinks else (generate,),
    )
    # It would write what it learns of loaded modules into the working folder.
    home = Path(tempfile.gettempdir()) / f"ddp_equivalence-hypothesis-{os.getuid()}"
    configuration.set_hypothesis_home_dir(home)
    # Its remarks on slow data are about tests; the search says itself what it has tried.
    logging.getLogger("hypothesis").setLevel(logging.ERROR)
    try:
        return hypothesis.find(values, condition, settings=settings, random=Random(seed))
    except NoSuchExample:
        return None
