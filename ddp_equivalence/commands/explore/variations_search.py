"""Vary a user's own case, and find the smallest case for each way in which the user's step is not
the big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.explore.drawing import draw_different, shrink
from ddp_equivalence.commands.explore.search_space import SearchSpace, search_space
from ddp_equivalence.commands.explore.variations import Variation, variations
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.ranks.failure import RanksTimedOut
from ddp_equivalence.report.verdict import Verdict

DEADLINE = 20.0
"""The seconds that the ranks get for one case if the caller gives no deadline. They are few,
because a search runs many cases."""

MOST_TIMEOUTS = 3
"""A search stops after this many cases that time out, because each takes its whole deadline."""

TIMED_OUT = "ranks timed out"

SEED = "0"
"""The seed of the search. It is fixed, so that the same options try the same variations."""

OUTCOMES = ("same", "different", "failed", "unknown", "refused")
"""A verdict's outcomes, and two more. "failed": the ranks failed, so nothing was compared.
"refused": ``check`` refused the case itself."""

Progress = Callable[[str], None]
"""A function that is called with every line that tells how far a search has come."""

RepeatLine = Callable[[Variation], str]
"""The command line that runs a variation again."""


@dataclass(frozen=True)
class VariationResult:
    """One of ``OUTCOMES``, and the cause or the reason."""

    outcome: str
    reason: str

    @property
    def group(self) -> tuple[str, str]:
        """The group of this result. The search finds one smallest case for each group.

        A failure's group is its reason; any other result's group is its outcome.
        """
        return self.outcome, self.reason if self.outcome == "failed" else ""


@dataclass
class VariationsSearch:
    """The results of a search.

    ``smallest``: for each group whose outcome is not "same", the smallest case, its result and its
    report.
    ``stopped``: why the search stopped before its end, if it did.
    """

    results: dict[Variation, VariationResult] = field(default_factory=dict)
    smallest: list[tuple[Variation, VariationResult, str]] = field(default_factory=list)
    stopped: str = ""

    def with_outcome(self, outcome: str) -> list[VariationResult]:
        return [result for result in self.results.values() if result.outcome == outcome]


def search(
    user_check: UserCheck,
    given: Mapping[str, Any],
    wanted: int,
    repeat: RepeatLine,
    progress: Progress = lambda line: None,
) -> VariationsSearch:
    """Try ``wanted`` variations of the user's case, and shrink those whose outcome is not "same".

    ``given``: the fields of the case, and ``examples``, that stay as they are. Ctrl-C ends the
    search, which then returns the results so far. Raises BadCase if no variation can run at all, if
    ``wanted`` is below 1, and if the options have ``in_process``.
    """
    if wanted < 1:
        raise BadCase("explore", wanted, "a number of cases from 1")
    if user_check.options.get("in_process"):
        raise BadCase("explore", wanted, "left out with --in-process, which has no deadline")
    space = search_space(user_check.case, user_check.step, dict(given), user_check.options)
    summary = VariationsSearch()
    drawn = draw_different(variations(space), wanted, SEED, different_seeds(space))
    try:
        _try_all(user_check, space, drawn, summary, repeat, progress)
        if summary.results and len(summary.with_outcome("refused")) == len(summary.results):
            # Raises the BadCase of the first variation.
            first = next(iter(summary.results))
            check(first.of(user_check.case), user_check.step, **user_check.options)
        _shrink_all(user_check, space, wanted, summary, repeat)
    except KeyboardInterrupt:
        summary.stopped = "interrupted"
    return summary


def different_seeds(space: SearchSpace) -> Callable[[Variation], bool]:
    """A condition that accepts no two variations with the same seed, if the seed may vary.

    After each draw, Hypothesis tries variations that differ from it in one thing only. Those
    with the same seed are refused.
    """
    seeds: set[int] = set()

    def accept(variation: Variation) -> bool:
        new = space.seed is not None or variation.seed not in seeds
        seeds.add(variation.seed)
        return new

    return accept


def _try_all(
    user_check: UserCheck,
    space: SearchSpace,
    drawn: tuple[Variation, ...],
    summary: VariationsSearch,
    repeat: RepeatLine,
    progress: Progress,
) -> None:
    # Layout after layout, so that ranks are started once for each.
    for layout in space.layouts:
        on_layout = [variation for variation in drawn if variation.layout == layout]
        for variation in on_layout:
            summary.results[variation], _ = _run(user_check, variation, repeat)
            timeouts = sum(result.reason == TIMED_OUT for result in summary.results.values())
            if timeouts >= MOST_TIMEOUTS:
                summary.stopped = f"stopped after {MOST_TIMEOUTS} cases that timed out"
                return
        progress(_progress_line(layout, [summary.results[variation] for variation in on_layout]))


def _shrink_all(
    user_check: UserCheck,
    space: SearchSpace,
    wanted: int,
    summary: VariationsSearch,
    repeat: RepeatLine,
) -> None:
    for group in sorted({result.group for result in summary.results.values()}):
        if group[0] in ("same", "refused"):
            continue
        in_group = [each for each, result in summary.results.items() if result.group == group]
        # A case with an empty shard is shown only if no other case is in the group, because an
        # empty shard can be the reason by itself.
        all_full = [variation for variation in in_group if not variation.has_an_empty_shard]
        candidates = all_full or in_group

        def holds(
            variation: Variation, group: tuple[str, str] = group, full: bool = bool(all_full)
        ) -> bool:
            if full and variation.has_an_empty_shard:
                return False
            return _run(user_check, variation, repeat)[0].group == group

        known = {variation: variation in candidates for variation in summary.results}
        smallest = shrink(variations(space), wanted, SEED, known, holds) or candidates[0]
        result, verdict = _run(user_check, smallest, repeat)
        summary.smallest.append((smallest, result, str(verdict)))


def _run(
    user_check: UserCheck, variation: Variation, repeat: RepeatLine
) -> tuple[VariationResult, Verdict | BadCase]:
    options = {"deadline": DEADLINE, **user_check.options, "steps": variation.steps}
    with _repeat_line(repeat(variation)):
        try:
            verdict = check(variation.of(user_check.case), user_check.step, **options)
        except BadCase as error:
            return VariationResult("refused", str(error)), error
    if verdict.failure is not None:
        return VariationResult("failed", _kind_of_failure(verdict)), verdict
    return VariationResult(verdict.outcome, verdict.cause or verdict.reason), verdict


@contextmanager
def _repeat_line(line: str) -> Iterator[None]:
    """Let verdicts show this line as the command that repeats them.

    A hang gets no second look here. It gets one when somebody repeats the case.
    """
    with settings.using(replace(settings.current(), repeat=line, second_look=False)):
        yield


def _kind_of_failure(verdict: Verdict) -> str:
    """The kind of a failure, in words that are the same for every case with such a failure."""
    failure = verdict.failure
    if failure is None or isinstance(failure, RanksTimedOut):
        return TIMED_OUT
    if not failure.ends:
        return verdict.reason
    end = failure.ends[0]
    return f"{verdict.reason}: {end.what.partition(':')[0] or end.kind}"


def _progress_line(layout: str, results: list[VariationResult]) -> str:
    counts = {each: sum(result.outcome == each for result in results) for each in OUTCOMES}
    text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return f"  {layout:<8}{len(results):>5}    {text}"
