"""Run random trials of the suite, and shrink those that the suite judges wrongly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.explore.drawing import draw_different, shrink
from ddp_equivalence.commands.explore.random_trials import (
    LAYOUTS,
    portable_strategies,
    random_trials,
    shows_its_cause,
)
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies.catalogue import Trial

SINGLE_RANK_SHARE = 20
"""At most one trial in this many runs on a single rank, where a strategy can do little wrong."""

Progress = Callable[[str], None]
"""Is called with every line that tells how far a search has come."""


@dataclass(frozen=True)
class JudgedTrial:
    """A trial that ran, what is known of it, and what the suite said.

    ``cause``: the cause of the known difference; None if the big batch is promised.
    ``named_cause``: the cause that the suite named. ``margin``: the worst error divided by its
    limit; None if nothing was compared. ``repeat``: a line that runs the trial again.
    """

    trial: Trial
    outcome: str
    cause: str | None
    named_cause: str | None
    reason: str
    margin: float | None
    repeat: str

    @property
    def right(self) -> bool:
        """True if the suite said what is known of the trial, or that it could not tell."""
        if self.outcome == "unknown":
            return True
        if self.cause is None:
            return self.outcome == "same"
        return self.outcome == "different" and self.named_cause == self.cause


@dataclass
class SuiteSearch:
    """The results of all trials of a search, or of those that ran before it was interrupted.

    ``smallest_mistakes``: for each strategy and kind of mistake, the smallest trial and its report.
    """

    seed: int
    judged: list[JudgedTrial] = field(default_factory=list)
    smallest_mistakes: list[tuple[JudgedTrial, str]] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def false_alarms(self) -> list[JudgedTrial]:
        return [each for each in self.judged if each.cause is None and not each.right]

    @property
    def misses(self) -> list[JudgedTrial]:
        return [each for each in self.judged if each.cause is not None and not each.right]


def search(
    right: int, wrong: int, seed: int, progress: Progress = lambda line: None
) -> SuiteSearch:
    """Try ``right`` random trials on which the big batch is promised, and ``wrong`` known
    differences. The trials are the same for the same seed.

    Ctrl-C ends the search, which then returns the results so far. Raises BadCase for a number below
    0, or if there is nothing to try.
    """
    for name, count in (("right", right), ("wrong", wrong), ("seed", seed)):
        if count < 0:
            raise BadCase(name, count, "an integer from 0")
    if not right + wrong:
        raise BadCase("right", 0, "a number of cases above 0, if wrong is 0 too")
    results = SuiteSearch(seed)
    started = time.monotonic()
    try:
        for count, promised in ((right, True), (wrong, False)):
            _search_kind(count, promised, results, progress)
    except KeyboardInterrupt:
        results.interrupted = True
    results.seconds = time.monotonic() - started
    return results


def draw_trials(count: int, promised: bool, seed: int) -> dict[str, tuple[Trial, ...]]:
    """At most ``count`` trials, by strategy. All strategies have about the same number."""
    return {
        name: draw_different(
            random_trials(name), share, f"{seed} {name}", _trials_of_kind(promised, share)
        )
        for name, share in _shares(count).items()
    }


def _shares(count: int) -> dict[str, int]:
    """The number of trials of each strategy, if there are ``count`` trials in all."""
    names = portable_strategies()
    each, left = divmod(count, len(names))
    return {name: each + (n < left) for n, name in enumerate(names) if each or n < left}


def _trials_of_kind(promised: bool, share: int) -> Callable[[Trial], bool]:
    """A condition that accepts trials of this kind, but no two with the same seed.

    After each draw, Hypothesis tries trials that differ from it in one thing only. Most of these
    have the same seed, and are refused.
    """
    seeds: set[int] = set()
    on_single_rank: list[Trial] = []

    def accept(trial: Trial) -> bool:
        single = trial.case.layout == "1x1"
        enough_single = len(on_single_rank) > share // SINGLE_RANK_SHARE
        if trial.case.seed in seeds or (single and enough_single):
            return False
        if not _is_of_kind(trial, promised):
            return False
        seeds.add(trial.case.seed)
        if single:
            on_single_rank.append(trial)
        return True

    return accept


def _is_of_kind(trial: Trial, promised: bool) -> bool:
    return trial.cause is None if promised else trial.cause is not None and shows_its_cause(trial)


def _search_kind(count: int, promised: bool, results: SuiteSearch, progress: Progress) -> None:
    if not count:
        return
    by_strategy = draw_trials(count, promised, results.seed)
    trials = [trial for of_strategy in by_strategy.values() for trial in of_strategy]
    progress(f"{len(trials)} random {'right cases' if promised else 'known differences'}")
    judged: dict[Trial, JudgedTrial] = {}
    # Layout after layout, so that ranks are started once for each.
    for layout in dict.fromkeys(LAYOUTS):
        on_layout = [trial for trial in trials if trial.case.layout == layout]
        for trial in on_layout:
            judged[trial] = _run(trial)[0]
            results.judged.append(judged[trial])
        if on_layout:
            state = _state([judged[trial] for trial in on_layout])
            progress(f"  {layout:<16} {len(on_layout):>5}    {state}")
    for strategy, share in _shares(count).items():
        mistaken = {trial: not judged[trial].right for trial in by_strategy[strategy]}
        if any(mistaken.values()):
            progress(f"  shrinking a case of {strategy} that was judged wrongly")
            smallest = _smallest_mistake(strategy, share, promised, mistaken, results.seed)
            results.smallest_mistakes.append(smallest)


def _state(judged: list[JudgedTrial]) -> str:
    wrong = sum(not each.right for each in judged)
    unknown = sum(each.outcome == "unknown" for each in judged)
    state = f"{wrong} JUDGED WRONGLY" if wrong else "all judged rightly"
    return f"{state}, {unknown} unknown" if unknown else state


def _smallest_mistake(
    strategy: str, share: int, promised: bool, mistaken: dict[Trial, bool], seed: int
) -> tuple[JudgedTrial, str]:
    def is_mistake(trial: Trial) -> bool:
        return _is_of_kind(trial, promised) and not _run(trial)[0].right

    first = next(trial for trial, wrong in mistaken.items() if wrong)
    trials = random_trials(strategy)
    return _run(shrink(trials, share, f"{seed} {strategy}", mistaken, is_mistake) or first)


def _run(trial: Trial) -> tuple[JudgedTrial, str]:
    """Check the trial; the report is empty if the suite was right."""
    verdict = check(trial.case, trial.strategy, **trial.options)
    judged = JudgedTrial(
        trial=trial,
        outcome=verdict.outcome,
        cause=trial.cause,
        named_cause=verdict.cause,
        reason=verdict.reason,
        margin=_margin(verdict),
        repeat=verdict.repeat,
    )
    return judged, str(verdict) if not judged.right else ""


def _margin(verdict: Verdict) -> float | None:
    return verdict.error / verdict.limit if verdict.error is not None and verdict.limit else None
