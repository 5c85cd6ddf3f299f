"""Vary somebody's own case, and shrink each way in which their step is not the big batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.explore.engine import draw, smallest
from ddp_equivalence.commands.explore.variations import Space, Variation, space_of, variations
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.ranks.failure import RanksTimedOut
from ddp_equivalence.report.verdict import Verdict

DEADLINE = 20.0
"""Seconds for the ranks' work of one case, where the caller gives none: a search meets many."""

MOST_HANGS = 3
"""A search does not go on after so many cases that hang: each of them takes its deadline."""

HANGS = "ranks timed out"

SEED = 0
"""Of the search: what is tried with the same options is the same."""

Told = Callable[[str], None]
Repeat = Callable[[Variation], str]


@dataclass(frozen=True)
class Tried:
    """What one variation came to, and why: the cause or the reason.

    ``kind``: "same", "different", "failed" (its ranks did), "unknown" (nothing was shown) or
    "refused" (the case itself cannot be).
    """

    kind: str
    why: str

    @property
    def group(self) -> tuple[str, str]:
        """What is shrunk to one smallest case: failures of one sort, and all else of one kind."""
        return self.kind, self.why if self.kind == "failed" else ""


@dataclass
class Searched:
    """What was tried, and the smallest case of each group that is not the same, with its report."""

    tried: dict[Variation, Tried] = field(default_factory=dict)
    smallest: list[tuple[Variation, Tried, str]] = field(default_factory=list)
    stopped: str = ""

    def of_kind(self, kind: str) -> list[Tried]:
        return [one for one in self.tried.values() if one.kind == kind]


def search(
    found: UserCheck,
    given: Mapping[str, Any],
    wanted: int,
    repeat: Repeat,
    tell: Told = lambda line: None,
) -> Searched:
    """Try ``wanted`` variations of the case, all that ``given`` leaves free; shrink what is found.

    ``given``: fields of the case and ``examples`` to hold fixed. ``repeat``: what to type to run a
    variation again. Ctrl-C ends it with what is there. Raises BadCase if no variation can run at
    all, for a number below 1, or where a debugger is waited for.
    """
    if wanted < 1:
        raise BadCase("explore", wanted, "a number of cases from 1")
    if found.options.get("in_process"):
        raise BadCase("explore", wanted, "not together with --in-process, which has no deadline")
    space = space_of(found.case, found.step, dict(given), found.options)
    searched = Searched()
    every = draw(variations(space), wanted, str(SEED), one_of_each_seed(space))
    try:
        for layout in space.layouts:  # ranks are started once for each
            here = [one for one in every if one.layout == layout]
            for variation in here:
                searched.tried[variation], _ = _run(found, variation, repeat)
                if sum(one.why == HANGS for one in searched.tried.values()) >= MOST_HANGS:
                    searched.stopped = f"stopped after {MOST_HANGS} cases that hang"
                    break
            if searched.stopped:
                break
            tell(_line(layout, [searched.tried[one] for one in here]))
        if searched.tried and len(searched.of_kind("refused")) == len(searched.tried):
            check(next(iter(searched.tried)).of(found.case), found.step, **found.options)
        _shrink_all(found, space, wanted, searched, repeat)
    except KeyboardInterrupt:
        searched.stopped = "interrupted"
    return searched


def one_of_each_seed(space: Space) -> Callable[[Variation], bool]:
    """Hypothesis follows up each draw with others that differ from it in one thing only."""
    seeds: set[int] = set()

    def accept(variation: Variation) -> bool:
        new = space.seed is not None or variation.seed not in seeds
        seeds.add(variation.seed)
        return new

    return accept


def _shrink_all(
    found: UserCheck, space: Space, wanted: int, searched: Searched, repeat: Repeat
) -> None:
    for group in sorted({one.group for one in searched.tried.values()}):
        if group[0] in ("same", "refused"):
            continue
        of_group = [of for of, one in searched.tried.items() if one.group == group]
        # An empty shard is a reason of its own: shown only where there is no other.
        without = [of for of in of_group if not of.has_an_empty_shard]
        wanted_ones = without or of_group

        def holds(
            variation: Variation, group: tuple[str, str] = group, all_full: bool = bool(without)
        ) -> bool:
            if all_full and variation.has_an_empty_shard:
                return False
            return _run(found, variation, repeat)[0].group == group

        known = {of: of in wanted_ones for of in searched.tried}
        least = smallest(variations(space), wanted, str(SEED), known, holds) or wanted_ones[0]
        tried, verdict = _run(found, least, repeat)
        searched.smallest.append((least, tried, str(verdict)))


def _run(found: UserCheck, variation: Variation, repeat: Repeat) -> tuple[Tried, Verdict | BadCase]:
    options = {"deadline": DEADLINE, **found.options, "steps": variation.steps}
    with _repeated_by(repeat(variation)):
        try:
            verdict = check(variation.of(found.case), found.step, **options)
        except BadCase as error:
            return Tried("refused", str(error)), error
    if verdict.failure is not None:
        return Tried("failed", _failure(verdict)), verdict
    return Tried(verdict.outcome, verdict.cause or verdict.reason), verdict


@contextmanager
def _repeated_by(line: str) -> Iterator[None]:
    """A hang is looked at twice only when somebody repeats it."""
    with settings.using(replace(settings.current(), repeat=line, second_look=False)):
        yield


def _failure(verdict: Verdict) -> str:
    """What happened, without what differs from case to case."""
    failure = verdict.failure
    if failure is None or isinstance(failure, RanksTimedOut):
        return HANGS
    if not failure.ends:
        return verdict.reason
    end = failure.ends[0]
    return f"{verdict.reason}: {end.what.partition(':')[0] or end.kind}"


def _line(layout: str, tried: list[Tried]) -> str:
    kinds = {kind: sum(one.kind == kind for one in tried) for kind in KINDS}
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return f"  {layout:<8}{len(tried):>5}    {text}"


KINDS = ("same", "different", "failed", "unknown", "refused")
