"""``ddp-equivalence check FILE.py --explore N``: try variations of a user's own case."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddp_equivalence.case import build, settings
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.shards import OWN, explicit_sizes
from ddp_equivalence.case.training import Steps
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.explore.drawing import (
    draw_different,
    integer,
    one_of,
    shrink,
    strategies,
)
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.ranks.failure import RanksTimedOut
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies import STRATEGIES


def explore_variations(
    user_check: UserCheck,
    given: Mapping[str, Any],
    count: int,
    target: str,
    options: Mapping[str, Any],
) -> str:
    """Vary a user's own case and print the results. Returns "same", "different" or "unknown".

    ``given``: fields of the case from the command line. ``target``: the file and step, as the
    command line has them. ``options``: its other options, for the line that repeats a case.
    """

    def repeat(variation: Variation) -> str:
        return " ".join(
            ["ddp-equivalence check", *_arguments(user_check, variation, target, options)]
        )

    _print(f"{count} variations of {user_check.case}")
    search = search_variations(user_check, given, count, repeat, progress=_print)
    for line in report_lines(search):
        _print(line)
    outcomes = {result.outcome for result in search.results.values()}
    if "different" in outcomes:
        return "different"
    judged = outcomes <= {"same", "refused"} and not search.stopped
    return "same" if judged else "unknown"


def _arguments(
    user_check: UserCheck, variation: Variation, target: str, options: Mapping[str, Any]
) -> list[str]:
    words = [target, "--layout", variation.layout, "--shards", variation.shards]
    if variation.examples is not None:
        words += ["--examples", build.as_text(variation.examples)]
    words += ["--seed", str(variation.seed)]
    if variation.dtype != user_check.case.dtype:
        words += ["--dtype", str(variation.dtype).removeprefix("torch.")]
    if variation.steps != user_check.options.get("steps", 1) or "steps" in options:
        words += ["--steps", str(variation.steps)]
    for option, value in options.items():
        if option != "steps":
            words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [shlex.quote(word) for word in words]


def _print(line: str) -> None:
    print(line, flush=True)


# The results of a search through variations of a user's own case, as text.

EXPLANATIONS = {
    "same": "the gradients of one big batch",
    "different": "not the big batch",
    "failed": "the ranks failed: nothing was compared",
    "unknown": "could not be judged",
    "refused": "cannot be run, and was left out",
}


def report_lines(search: VariationsSearch) -> Iterator[str]:
    """A count of every outcome, and the report on each smallest case that the search has found."""
    for outcome in OUTCOMES:
        results = search.with_outcome(outcome)
        if not results:
            continue
        yield f"{len(results):>5} {outcome:<10} {EXPLANATIONS[outcome]}"
        reasons = Counter(result.reason for result in results if result.reason)
        for reason, count in reasons.most_common():
            yield f"        {count:>5} {reason.splitlines()[0]}"
    if search.stopped:
        yield f"  {search.stopped}: some variations were not tried"
    for variation, result, report in search.smallest:
        yield ""
        case = f"{variation.layout}, shards {variation.shards}"
        yield f"The smallest case that is {result.outcome}: {case}"
        yield ""
        yield report.rstrip()


# Draw variations of a user's own case: other fields, while the user's code stays as it is.

MOST_STEPS = 3
MOST_SEED = 99_999

MOST_POSITIONS = 24
"""A variation with at most this many examples may take them at any positions of the batch. If it
has more, they are the first ones of the batch."""

UNEVEN = ("uneven",) * 3
"""Uneven shards are drawn three times as often as other kinds, because most faults show on them."""

EVEN_SHARDS = ("equal", "interleaved", "no_valid_token")
"""Shards with the same number of examples on every rank."""


@dataclass(frozen=True)
class Variation:
    """One way to run the step.

    ``examples``: the examples of all steps together; None if they are those of the case.
    """

    layout: str
    shards: str
    examples: build.ExampleSubset | None
    dtype: torch.dtype | None
    seed: int
    steps: Steps

    @property
    def has_an_empty_shard(self) -> bool:
        return "0" in self.shards.split("+")

    def of(self, case: Case) -> Case:
        """The case with the fields of this variation. Raises BadCase if it cannot have them."""
        varied = replace(
            case, layout=self.layout, shards=self.shards, dtype=self.dtype, seed=self.seed
        )
        return varied if self.examples is None else build.with_examples(varied, self.examples)


@strategies.composite
def variations(draw: strategies.DrawFn, space: SearchSpace) -> Variation:
    """Draw a variation.

    A variation shrinks to few ranks, equal shards, few examples from the start of the batch, one
    step, float64, seed 0.
    """
    layout = one_of(draw, space.layouts)
    steps = _steps(draw, space)
    batches = steps if space.by_position and isinstance(steps, int) else 1
    shards, each = _shards_and_examples(
        draw, space, parse(layout).world_size, max(1, space.available // batches)
    )
    taken = space.examples if space.takes_all else _examples(draw, space, each * batches)
    dtype = one_of(draw, space.dtypes)
    seed = integer(draw, 0, MOST_SEED) if space.seed is None else space.seed
    return Variation(layout, shards, taken, dtype, seed, steps)


def _steps(draw: strategies.DrawFn, space: SearchSpace) -> Steps:
    if space.steps is not None:
        return space.steps
    counts = [n for n in range(1, MOST_STEPS + 1) if n <= space.available]
    if space.takes_all:
        counts = [n for n in counts if space.available % n == 0]
    if space.shards is not None and "+" in space.shards and space.by_position:
        # The shards name the sizes of one step.
        sizes = sum(map(int, space.shards.split("+")))
        counts = [n for n in counts if n * sizes <= space.available and not space.takes_all] or [1]
    return one_of(draw, counts)


def _shards_and_examples(
    draw: strategies.DrawFn, space: SearchSpace, world_size: int, most: int
) -> tuple[str, int]:
    """The shards of one big batch, and its number of examples: at most ``most``."""
    if space.shards is not None:
        return space.shards, _examples_for_given_shards(draw, space, world_size, most)
    kinds = []
    if most >= world_size and not (space.takes_all and most % world_size):
        kinds += ["equal", "interleaved"] if world_size > 1 else ["equal"]
    if world_size > 1:
        kinds += [*UNEVEN, "empty"] if most > world_size else ["empty"]
    kind = one_of(draw, kinds)
    if kind in EVEN_SHARDS:
        each = most // world_size
        return kind, world_size * (each if space.takes_all else integer(draw, 1, each))
    sizes = _unequal_sizes(draw, kind, world_size, most, space.takes_all)
    return "+".join(map(str, sizes)), sum(sizes)


def _unequal_sizes(
    draw: strategies.DrawFn, kind: str, world_size: int, most: int, takes_all: bool
) -> list[int]:
    """How many examples each rank has.

    ``kind``: "uneven" if each rank has some, "empty" if at least one rank has none.
    """
    least = 1 if kind == "uneven" else 0
    sizes: list[int] = []
    for ranks_left in reversed(range(world_size)):
        room = most - sum(sizes) - least * ranks_left
        twice_an_equal_share = -(-2 * most // world_size)
        sizes.append(integer(draw, least, max(least, min(room, twice_an_equal_share))))
    if kind == "empty":
        empty = integer(draw, 0, world_size - 1)
        # If all examples must be taken, the rank before the empty one takes over its examples.
        # Otherwise that rank gets one example if no other rank has any.
        no_others = sum(sizes) == sizes[empty]
        sizes[empty - 1] += max(sizes[empty] * takes_all, no_others)
        sizes[empty] = 0
    if takes_all:
        sizes[sizes.index(max(sizes))] += most - sum(sizes)
    return sizes


def _examples_for_given_shards(
    draw: strategies.DrawFn, space: SearchSpace, world_size: int, most: int
) -> int:
    """A number of examples that the given shards can have."""
    sizes = explicit_sizes(str(space.shards), world_size)
    if sizes is not None:
        return sum(sizes)
    if space.takes_all:
        return most
    if space.shards in EVEN_SHARDS:
        return world_size * integer(draw, 1, max(1, most // world_size))
    return integer(draw, 1, most)


def _examples(draw: strategies.DrawFn, space: SearchSpace, count: int) -> build.ExampleSubset:
    """The first examples of the batch, or examples at any positions in any order."""
    if not space.by_position or count > MOST_POSITIONS or one_of(draw, (True, False)):
        return count
    left = list(range(space.available))
    return tuple(
        left.pop(integer(draw, 0, len(left) - 1)) for _ in range(min(count, space.available))
    )


# Vary a user's own case, and find the smallest case for each way in which the user's step is not
# the big batch.

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


def search_variations(
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


# Which properties of a user's own case may vary, and which stay as they are.

LAYOUTS = ("1x1", "1x2", "2x1", "1x3", "1+2", "1x4", "2x2", "1+3")
"""From small to large, since shrinking prefers the first."""

DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32)

CATALOGUE_EXAMPLES = 16
"""The most examples of a batch if the catalogue makes it. Such a batch has no size of its own."""


@dataclass(frozen=True)
class SearchSpace:
    """All variations of a case. A field that is None may have any value.

    ``available``: the number of examples to choose from; ``takes_all``: every variation takes all
    of them. ``by_position``: a variation may take examples at any positions of the user's batch.
    """

    available: int
    takes_all: bool
    examples: build.ExampleSubset | None
    layouts: tuple[str, ...]
    shards: str | None
    dtypes: tuple[torch.dtype | None, ...]
    seed: int | None
    steps: Steps | None
    by_position: bool


def search_space(
    case: Case, step: object, given: dict[str, Any], options: dict[str, Any]
) -> SearchSpace:
    """The variations of a case in which everything may vary that the caller has not given.

    ``given``: fields of the case and ``examples``, from the command line. ``options``: arguments of
    ``check``. The code of a trainer (``compare="update"``) fixes how many ranks there are and how
    many examples each step has, so these do not vary. Raises BadCase if no variation could run.
    """
    trains = options.get("compare") == "update"
    steps = options.get("steps", 1 if trains else None)
    keeps_shards = trains or isinstance(steps, tuple) or case.shards == OWN
    shards = given.get("shards", case.shards if keeps_shards else None)
    layouts = (given["layout"],) if "layout" in given else _layouts(case, step, shards, trains)
    if not layouts:
        right = f"shards for as many ranks as one of these layouts has: {', '.join(LAYOUTS)}"
        raise BadCase("shards", shards, right)
    examples = given.get("examples")
    dtypes = (given["dtype"],) if "dtype" in given else tuple(dict.fromkeys([*DTYPES, case.dtype]))
    if examples is not None:
        build.with_examples(case, examples)
        available = examples if isinstance(examples, int) else len(examples)
    else:
        own = case.batch is not None
        available = build.examples_in(case) if own else CATALOGUE_EXAMPLES
    return SearchSpace(
        available=available,
        takes_all=trains or isinstance(steps, tuple) or examples is not None,
        examples=examples,
        layouts=layouts,
        shards=shards,
        dtypes=dtypes,
        seed=given.get("seed"),
        steps=steps,
        by_position=case.batch is not None,
    )


def _layouts(case: Case, step: object, shards: str | None, trains: bool) -> tuple[str, ...]:
    strategy = STRATEGIES.get(step) if isinstance(step, str) else None
    suitable = []
    for name in dict.fromkeys([*LAYOUTS, case.layout]):
        ranks = parse(name)
        one_process = strategy is not None and strategy.one_process
        if one_process and (ranks.nodes > 1 or ranks.world_size == 1):
            continue
        if trains and ranks.world_size != case.ranks.world_size:
            continue
        if shards is None or _suits(shards, ranks.world_size):
            suitable.append(name)
    return tuple(sorted(suitable, key=lambda name: parse(name).world_size))


def _suits(shards: str, world_size: int) -> bool:
    try:
        explicit_sizes(shards, world_size)
    except BadCase:
        return False
    return True
