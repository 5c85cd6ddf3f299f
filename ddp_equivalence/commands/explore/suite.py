"""Runs random trials of the suite, shrinks those that it judges wrongly, and reports them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import NAMED_SIZES, split
from ddp_equivalence.case.training import Compare, Steps
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.explore.drawing import (
    draw_different,
    integer,
    one_of,
    shrink,
    strategies,
)
from ddp_equivalence.measurement.request import lane_of
from ddp_equivalence.ranks.lanes import CannotRunHere
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import Trial, go_together
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES

# Run random trials of the suite, and shrink those that the suite judges wrongly.

SINGLE_RANK_SHARE = 20
"""At most one trial in this many runs on a single rank, where a strategy can do little wrong."""

Progress = Callable[[str], None]
"""A function that is called with every line that tells how far a search has come."""


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

    After each draw, Hypothesis tries trials that differ from it in one thing only. Those with the
    same seed are refused.
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


# The results of a search through random trials of the suite, as text and for machines.


def report_lines(search: SuiteSearch) -> Iterator[str]:
    """The tables, the report on the smallest case of each mistake, and a line that counts all."""
    right = [each for each in search.judged if each.cause is None]
    wrong = [each for each in search.judged if each.cause is not None]
    if right:
        yield from _right_cases_table(right)
    if wrong:
        yield from _known_differences_table(wrong)
    for mistake, report in search.smallest_mistakes:
        yield ""
        kind = "False alarm" if mistake.cause is None else f"Missed: {mistake.cause}"
        yield f"{kind}, shrunk to the smallest case:"
        yield report.rstrip()
    yield ""
    if search.interrupted:
        yield "INTERRUPTED: only the cases above were tried"
    yield (
        f"{len(right)} random right cases: {len(search.false_alarms)} false alarms; "
        f"{len(wrong)} random known differences: {len(search.misses)} missed or misnamed; "
        f"seed {search.seed}, {search.seconds:.0f} s"
    )


def as_json(search: SuiteSearch) -> dict[str, Any]:
    """The same results as values that can be written as JSON."""
    return {
        "seed": search.seed,
        "interrupted": search.interrupted,
        "seconds": round(search.seconds, 1),
        "right": sum(each.cause is None for each in search.judged),
        "false_alarms": len(search.false_alarms),
        "known_differences": sum(each.cause is not None for each in search.judged),
        "misses": len(search.misses),
        "smallest": [
            {"repeat": mistake.repeat, "report": report}
            for mistake, report in search.smallest_mistakes
        ],
        "cases": [
            {
                "id": str(each.trial),
                "strategy": each.trial.strategy,
                "expected": each.cause or "same",
                "outcome": each.outcome,
                "cause": each.named_cause,
                "reason": each.reason,
                "error_over_limit": each.margin,
                "right": each.right,
                "repeat": each.repeat,
            }
            for each in search.judged
        ],
    }


def _right_cases_table(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    rows: dict[tuple[str, str], list[JudgedTrial]] = {}
    for each in judged:
        rows.setdefault((each.trial.strategy, each.trial.case.dtype_name), []).append(each)
    width = max(len(strategy) for strategy, _ in rows) + 2
    yield f"{'random right cases':<{width + 10}}{'cases':>7}{'same':>7}{'false alarms':>14}" + (
        f"{'unknown':>9}{'worst error / limit':>21}"
    )
    for (strategy, dtype), row in sorted(rows.items()):
        yield f"{strategy:<{width}}{dtype:<10}{_cells(row)}"
    yield f"{'all':<{width + 10}}{_cells(judged)}"
    yield from _reasons_for_unknown(judged)


def _cells(row: Sequence[JudgedTrial]) -> str:
    outcomes = Counter(each.outcome for each in row)
    margins = [each.margin for each in row if each.margin is not None and each.outcome == "same"]
    worst = f"{max(margins):.2f}" if margins else "–"
    counts = (len(row), outcomes["same"], outcomes["different"], outcomes["unknown"])
    cells = zip(counts, (7, 7, 14, 9), strict=True)
    return "".join(f"{count:>{width}}" for count, width in cells) + f"{worst:>21}"


def _known_differences_table(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    yield ""
    rows: dict[str, list[JudgedTrial]] = {}
    for each in judged:
        rows.setdefault(str(each.cause), []).append(each)
    width = max(map(len, [*rows, "random known differences"])) + 2
    head = f"{'cases':>7}{'caught':>9}{'named':>9}{'unknown':>9}"
    yield f"{'random known differences':<{width}}{head}"
    for cause, row in [*sorted(rows.items()), ("all", list(judged))]:
        caught = [each for each in row if each.outcome == "different"]
        named = sum(each.named_cause == each.cause for each in caught)
        unknown = sum(each.outcome == "unknown" for each in row)
        yield f"{cause:<{width}}{len(row):>7}{len(caught):>9}{named:>9}{unknown:>9}"
    yield from _reasons_for_unknown(judged)


def _reasons_for_unknown(judged: Sequence[JudgedTrial]) -> Iterator[str]:
    """Each reason why cases could not be judged, with a line that repeats one of them."""
    by_reason: dict[str, list[JudgedTrial]] = {}
    for each in judged:
        if each.outcome == "unknown":
            by_reason.setdefault(each.reason, []).append(each)
    for reason, unknown in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        yield f"unknown, {len(unknown)}: {reason}"
        yield f"  {unknown[0].repeat}"


# Draw random trials of the suite, far more than the catalogue contains.

SMALL_LAYOUTS = (
    *("1x2", "2x1", "1x3", "3x1", "1+2", "2+1", "1x4", "2x2", "4x1", "1+3", "3+1"),
    *("1+2+1", "2x2-round-robin", "1+2-round-robin"),
)
"""Layouts of two to four ranks, from small to large, since shrinking prefers the first."""

LAYOUTS = ("1x1", *SMALL_LAYOUTS * 6, "1x1", "1x1", "2x4", "1x8")
"""The layouts to draw from. A layout that is listed more often is drawn more often. Eight ranks are
listed once, because they are slow on few cores; a single rank is listed a few times only, because
there is little to find."""

LEAST_EXAMPLES = 3
"""The fewest examples of one big batch. In losses with positive examples, one in every three
examples is positive; without a positive one the loss would be 0 / 0."""

MOST_PER_RANK = 8
EVEN_SHARDS = ("equal", "interleaved", "no_valid_token")
OTHER_SHARDS = ("sizes", "uneven", "one_example", "empty")
DTYPES = (torch.float64, torch.float32)
COMPARES: tuple[Compare, ...] = ("gradients", "update")
MOST_STEPS = 3
MOST_SEED = 99_999


@strategies.composite
def random_trials(draw: strategies.DrawFn, strategy: str) -> Trial:
    """Draw a trial of this strategy that can run on this machine, whether or not the strategy
    promises the big batch for it.

    A trial shrinks to few ranks, plain models and losses, few examples in equal shards, the
    gradients of one step, float64, seed 0.
    """
    layout = one_of(draw, [name for name in LAYOUTS if _layout_suits(strategy, name)])
    model = one_of(draw, [name for name in MODELS if _suits(name, strategy)])
    loss = one_of(draw, [name for name in LOSSES if _fits(model, name)])
    world_size = parse(layout).world_size
    shards, examples = _shards_and_examples(draw, world_size, strategy, model, loss)
    steps = _steps(draw, world_size, model, shards, examples)
    compare = one_of(draw, COMPARES)
    dtype = one_of(draw, DTYPES)
    seed = integer(draw, 0, MOST_SEED)
    case = Case(
        model=model,
        loss=loss,
        layout=layout,
        shards=shards,
        dtype=dtype,
        seed=seed,
        examples=examples,
    )
    on_gpu = MODELS[model].draws_random_numbers and _computes_on_gpus(case, strategy)
    return Trial(case, strategy, steps=steps, compare=compare, on_gpu=on_gpu)


def _computes_on_gpus(case: Case, strategy: str) -> bool:
    try:
        lane = lane_of(case, STRATEGIES[strategy], settings.current().backend, ())
    except CannotRunHere:
        return False
    return lane.device_type != "cpu"


def portable_strategies() -> tuple[str, ...]:
    """The strategies that run on every machine."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.lane is None)


def shows_its_cause(trial: Trial) -> bool:
    """False for a known difference that could as well have another cause.

    This is so if one rank has all data: the gradients of a mean, of a sum and of the big batch are
    then multiples of each other. It is also so for several updates: if the first is wrong, the
    later ones start from wrong weights.
    """
    case = trial.case
    indices = split(case.shards, case.catalogue_examples, case.ranks.world_size).indices
    with_data = indices[:-1] if case.shards == "no_valid_token" else indices
    several_updates = trial.compare == "update" and trial.steps != 1
    return sum(map(bool, with_data)) > 1 and not several_updates


def _shards_and_examples(
    draw: strategies.DrawFn, world_size: int, strategy: str, model: str, loss: str
) -> tuple[str, int]:
    """The shards, and the number of examples in the big batch."""
    of_few = LOSSES[loss].batch_coupled == "statistic_not_additive"  # the root of one is no root
    coupled = MODELS[model].batch_coupled or of_few
    on_tokens = LOSSES[loss].output == "tokens"
    even = [name for name in EVEN_SHARDS if name != "no_valid_token" or on_tokens]
    # What couples examples gets equal shards, so that only one thing differs.
    shards = one_of(draw, ["equal"] if coupled else [*even, *OTHER_SHARDS])
    if shards in EVEN_SHARDS:
        # A statistic of one example is none.
        least = max(2 if coupled else 1, -(-LEAST_EXAMPLES // world_size))
        each = integer(draw, least, MOST_PER_RANK)
        if STRATEGIES[strategy].accumulates:
            each *= MICRO_BATCHES if coupled else one_of(draw, (1, MICRO_BATCHES))
        return shards, each * world_size
    if shards != "sizes":
        return shards, integer(draw, LEAST_EXAMPLES, MOST_PER_RANK * world_size)
    sizes = [integer(draw, 0, MOST_PER_RANK) for _ in range(world_size)]
    sizes[-1] += max(0, LEAST_EXAMPLES - sum(sizes))
    return "+".join(map(str, sizes)), sum(sizes)


def _steps(
    draw: strategies.DrawFn, world_size: int, model: str, shards: str, examples: int
) -> Steps:
    """The number of big batches if all have the same size; otherwise the size of each."""
    count = integer(draw, 1, MOST_STEPS)
    one_size = shards not in NAMED_SIZES or bool(MODELS[model].batch_coupled)
    if count == 1 or one_size or not one_of(draw, (False, True)):
        return count
    unit = world_size if shards in EVEN_SHARDS else 1
    least = -(-LEAST_EXAMPLES // unit)
    most = max(least, examples // unit)
    return (examples, *(unit * integer(draw, least, most) for _ in range(count - 1)))


def _layout_suits(strategy: str, layout: str) -> bool:
    """A strategy of one process needs one node, and more than one replica: with a single replica it
    would only call the module.
    """
    ranks = parse(layout)
    return not STRATEGIES[strategy].one_process or (ranks.nodes == 1 and ranks.world_size > 1)


def _suits(model: str, strategy: str) -> bool:
    if MODELS[model].only_exact:
        return False
    # The strategy may happen to draw the same masks as the big batch.
    in_turn = STRATEGIES[strategy].runs_forward_in_turn
    return not (MODELS[model].draws_random_numbers and in_turn)


def _fits(model: str, loss: str) -> bool:
    return go_together(MODELS[model], LOSSES[loss])
