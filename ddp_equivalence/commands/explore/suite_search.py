"""Run random trials of the suite, and shrink those on which the suite is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.check_equivalence import check
from ddp_equivalence.commands.explore.engine import draw, smallest
from ddp_equivalence.commands.explore.random_trials import (
    LAYOUTS,
    strategies_here,
    tells_its_cause,
    trials,
)
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies.catalogue import Trial

MOST_ALONE = 20
"""One in so many may be on a single rank, where everything is promised and little is shown."""

Told = Callable[[str], None]


@dataclass(frozen=True)
class Tried:
    """One trial that ran: what was known of it before, and what the suite said.

    ``cause`` and ``named``: the name of the known difference, and the name that was given.
    ``margin``: worst error over its limit, None where nothing was compared. ``repeat``: a line that
    runs the trial again.
    """

    trial: Trial
    outcome: str
    cause: str | None
    named: str | None
    reason: str
    margin: float | None
    repeat: str

    @property
    def right(self) -> bool:
        """True if the suite said what is known, or that it cannot tell."""
        if self.outcome == "unknown":
            return True
        if self.cause is None:
            return self.outcome == "same"
        return self.outcome == "different" and self.named == self.cause


@dataclass
class Tally:
    """What a search has found so far; complete unless it was interrupted.

    ``wrong``: the smallest trial for each strategy and kind of mistake, with its report.
    """

    seed: int
    wanted_right: int
    wanted_wrong: int
    tried: list[Tried] = field(default_factory=list)
    wrong: list[tuple[Tried, str]] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def false_alarms(self) -> list[Tried]:
        return [one for one in self.tried if one.cause is None and not one.right]

    @property
    def misses(self) -> list[Tried]:
        return [one for one in self.tried if one.cause is not None and not one.right]


def search(right: int, wrong: int, seed: int, tell: Told = lambda line: None) -> Tally:
    """Try ``right`` random trials on which the big batch is promised and ``wrong`` known
    differences, the same ones for the same seed. Ctrl-C ends it with what is there.

    Raises BadCase for a number below 0, or nothing to try.
    """
    for name, count in (("right", right), ("wrong", wrong), ("seed", seed)):
        if count < 0:
            raise BadCase(name, count, "an integer from 0")
    if not right + wrong:
        raise BadCase("right", 0, "a number of cases above 0, here or in wrong")
    tally = Tally(seed, right, wrong)
    started = time.monotonic()
    try:
        for count, promised in ((right, True), (wrong, False)):
            _try_all(count, promised, tally, tell)
    except KeyboardInterrupt:
        tally.interrupted = True
    tally.seconds = time.monotonic() - started
    return tally


def drawn(count: int, promised: bool, seed: int) -> dict[str, tuple[Trial, ...]]:
    """At most ``count`` trials, by strategy, about as many of each."""
    return {
        name: draw(trials(name), share, f"{seed} {name}", _accepts(promised, share))
        for name, share in _shares(count).items()
    }


def _shares(count: int) -> dict[str, int]:
    names = strategies_here()
    each, left = divmod(count, len(names))
    return {name: each + (n < left) for n, name in enumerate(names) if each or n < left}


def _accepts(promised: bool, share: int) -> Callable[[Trial], bool]:
    """Trials of one kind, no two with the same seed.

    Hypothesis follows up each draw with others that differ from it in one thing only.
    """
    seeds: set[int] = set()
    alone: list[Trial] = []

    def accept(trial: Trial) -> bool:
        single = trial.case.layout == "1x1"
        if trial.case.seed in seeds or (single and len(alone) > share // MOST_ALONE):
            return False
        if not _is_of_kind(trial, promised):
            return False
        seeds.add(trial.case.seed)
        if single:
            alone.append(trial)
        return True

    return accept


def _is_of_kind(trial: Trial, promised: bool) -> bool:
    return trial.cause is None if promised else trial.cause is not None and tells_its_cause(trial)


def _try_all(count: int, promised: bool, tally: Tally, tell: Told) -> None:
    if not count:
        return
    kind = "right" if promised else "known differences"
    by_strategy = drawn(count, promised, tally.seed)
    every = [trial for of_one in by_strategy.values() for trial in of_one]
    tell(f"{len(every)} random {kind}")
    found: dict[Trial, Tried] = {}
    # Layout after layout: ranks are started once for each.
    for layout in dict.fromkeys(LAYOUTS):
        here = [trial for trial in every if trial.case.layout == layout]
        for trial in here:
            found[trial] = _run(trial)[0]
            tally.tried.append(found[trial])
        if here:
            tell(f"  {layout:<16} {len(here):>5}    {_state([found[one] for one in here])}")
    for strategy, share in _shares(count).items():
        of_one = {trial: not found[trial].right for trial in by_strategy[strategy]}
        if any(of_one.values()):
            tell(f"  shrinking what is wrong with {strategy}")
            tally.wrong.append(_smallest(strategy, share, promised, of_one, tally.seed))


def _state(tried: list[Tried]) -> str:
    wrong = sum(not one.right for one in tried)
    unknown = sum(one.outcome == "unknown" for one in tried)
    state = f"{wrong} WRONG" if wrong else "as known"
    return f"{state}, {unknown} unknown" if unknown else state


def _smallest(
    strategy: str, share: int, promised: bool, known: dict[Trial, bool], seed: int
) -> tuple[Tried, str]:
    def is_wrong(trial: Trial) -> bool:
        return _is_of_kind(trial, promised) and not _run(trial)[0].right

    least = smallest(trials(strategy), share, f"{seed} {strategy}", known, is_wrong)
    return _run(least or next(trial for trial, wrong in known.items() if wrong))


def _run(trial: Trial) -> tuple[Tried, str]:
    """The trial and its report."""
    verdict = check(trial.case, trial.strategy, **trial.options)
    tried = Tried(
        trial=trial,
        outcome=verdict.outcome,
        cause=trial.cause,
        named=verdict.cause,
        reason=verdict.reason,
        margin=_margin(verdict),
        repeat=verdict.repeat,
    )
    return tried, str(verdict) if not tried.right else ""


def _margin(verdict: Verdict) -> float | None:
    return verdict.error / verdict.limit if verdict.error is not None and verdict.limit else None
