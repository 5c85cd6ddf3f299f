"""Search random cases for those that are judged wrongly, and shrink one of each kind.

The cases are those of the suite (``explore``), or variations of a user's own (``check --explore``).
"""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Generic, TypeVar

import torch

from ddp_equivalence.case import build, settings
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import NAMED_SIZES, OWN, explicit_sizes, split
from ddp_equivalence.case.training import Compare, Steps
from ddp_equivalence.checking.check import check
from ddp_equivalence.commands.output import columns
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.measurement.request import lane_of
from ddp_equivalence.ranks.failure import RanksTimedOut
from ddp_equivalence.ranks.lanes import CannotRunHere
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import Trial, go_together
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES

# Draw values, try them, and shrink those that are judged wrongly.
#
# A value is made of choices, which are integers from 0. A smaller value has fewer choices, or
# smaller ones, so whoever makes values lets the simplest thing come first.

DRAWS_PER_VALUE = 60
"""The most draws for each value that is wanted. Many drawn values are refused, or not new."""

SHRINKING_SECONDS = 60.0
"""After this time the smallest case so far is taken: a case that hangs takes its whole deadline."""

MOST_SEED = 99_999
MOST_STEPS = 3
DTYPES = (torch.float64, torch.float32)
EVEN_SHARDS = ("equal", "interleaved", "no_valid_token")
"""Shards with the same number of examples on every rank."""

Value = TypeVar("Value", bound=Hashable)
Item = TypeVar("Item")


class Draw:
    """The choices of one value: those that are given, and then random ones, or 0."""

    def __init__(self, random: Random | None = None, given: Sequence[int] = ()) -> None:
        self._random, self._given = random, given
        self.choices: tuple[int, ...] = ()

    def integer(self, least: int, most: int) -> int:
        """An integer from ``least`` to ``most``, all equally likely; shrinks to ``least``."""
        choice, number = 0, len(self.choices)
        if number < len(self._given):
            choice = min(self._given[number], most - least)
        elif self._random is not None:
            choice = self._random.randint(0, most - least)
        self.choices += (choice,)
        return least + choice

    def one_of(self, items: Sequence[Item]) -> Item:
        """One of these items, all equally likely; shrinks to the first."""
        return items[self.integer(0, len(items) - 1)]


Make = Callable[[Draw], Value]
"""Makes a value of what it draws."""


def draw_different(
    make: Make[Value], wanted: int, seed: str, accept: Callable[[Value], bool] = lambda value: True
) -> dict[Value, tuple[int, ...]]:
    """``wanted`` different values that are accepted, with their choices; fewer if they are rare."""
    random, drawn = Random(seed), dict[Value, tuple[int, ...]]()
    for _ in range(DRAWS_PER_VALUE * wanted):
        if len(drawn) == wanted:
            break
        draw = Draw(random)
        value = make(draw)
        if value not in drawn and accept(value):
            drawn[value] = draw.choices
    return drawn


def shrink(make: Make[Value], choices: tuple[int, ...], holds: Callable[[Value], bool]) -> Value:
    """The smallest value for which ``holds`` that is found from that of these choices."""
    until = time.monotonic() + SHRINKING_SECONDS
    smallest = make(Draw(given=choices))
    held, place, since_smaller = {smallest: True}, 0, 0
    while since_smaller < len(choices) and time.monotonic() < until:
        place %= len(choices)
        before, choice, after = choices[:place], choices[place], choices[place + 1 :]
        less = [(*before, one, *after) for one in dict.fromkeys((0, choice // 2, choice - 1))]
        for candidate in [*(less if choice else ()), before + after]:
            draw = Draw(given=candidate)
            value = make(draw)
            is_smaller = (len(draw.choices), draw.choices) < (len(choices), choices)
            if is_smaller and value not in held:
                held[value] = holds(value)
            if is_smaller and held[value]:
                smallest, choices, since_smaller = value, draw.choices, 0
                break
        else:
            place, since_smaller = place + 1, since_smaller + 1
    return smallest


@dataclass(frozen=True)
class Judged:
    """The result of one value.

    ``outcome``: that of the verdict, "failed" if ranks failed, or "refused" if ``check`` refused
    the case. ``reason``: the cause, or why nothing was shown. ``kind``: one value of each kind is
    shrunk; "" if it is judged as it should be. ``margin``: the worst error divided by its limit.
    """

    outcome: str
    reason: str
    kind: str
    margin: float | None = None
    repeat: str = ""


Run = Callable[[Value], tuple[Judged, Verdict | BadCase]]


@dataclass
class Search(Generic[Value]):
    """The results so far. ``smallest``: the smallest value of each kind, with its report.
    ``stopped``: why the search stopped before its end, or "".
    """

    judged: dict[Value, Judged] = field(default_factory=dict)
    smallest: list[tuple[Value, Judged, str]] = field(default_factory=list)
    stopped: str = ""

    def try_all(
        self, values: Sequence[Value], layout: Callable[[Value], str], run: Run[Value]
    ) -> None:
        """Run them layout after layout, so that ranks are started once for each."""
        names = sorted(
            {layout(one) for one in values}, key=lambda one: (parse(one).world_size, one)
        )
        for name in names:
            on_layout = [one for one in values if layout(one) == name]
            for value in on_layout:
                self.judged[value], _ = run(value)
                timeouts = sum(one.reason == TIMED_OUT for one in self.judged.values())
                if timeouts >= MOST_TIMEOUTS:
                    self.stopped = f"stopped after {MOST_TIMEOUTS} cases that timed out"
                    return
            counts = Counter(self.judged[value].outcome for value in on_layout)
            wrong = sum(bool(self.judged[value].kind) for value in on_layout)
            text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
            note = f"; {wrong} not as it should be" if wrong else ""
            show(f"  {name:<16}{len(on_layout):>5}    {text}{note}")

    def shrink_all(
        self,
        make: Make[Value],
        drawn: Mapping[Value, tuple[int, ...]],
        run: Run[Value],
        may_be: Callable[[Value], bool] = lambda value: True,
    ) -> None:
        """Shrink one value of each kind; only values that ``may_be``, unless the kind has none."""
        for kind in sorted({one.kind for one in self.judged.values()} - {""}):
            of_kind = [one for one in drawn if one in self.judged and self.judged[one].kind == kind]
            if not of_kind:
                continue
            wanted = [one for one in of_kind if may_be(one)]

            def holds(value: Value, kind: str = kind, any_value: bool = not wanted) -> bool:
                return (any_value or may_be(value)) and run(value)[0].kind == kind

            smallest = shrink(make, drawn[(wanted or of_kind)[0]], holds)
            judged, verdict = run(smallest)
            self.smallest.append((smallest, judged, str(verdict)))


TIMED_OUT = "ranks timed out"
MOST_TIMEOUTS = 3
"""A search stops after this many cases that time out, because each takes its whole deadline."""


def show(line: str) -> None:
    """Print the line now: a search takes long."""
    print(line, flush=True)


def _margin(verdict: Verdict) -> float | None:
    return verdict.error / verdict.limit if verdict.error is not None and verdict.limit else None


# Random trials of the suite, far more than the catalogue contains.

SINGLE_RANK_SHARE = 20
"""At most one trial in this many runs on a single rank, where a strategy can do little wrong."""

SMALL_LAYOUTS = (
    *("1x2", "2x1", "1x3", "3x1", "1+2", "2+1", "1x4", "2x2", "4x1", "1+3", "3+1"),
    *("1+2+1", "2x2-round-robin", "1+2-round-robin"),
)
LAYOUTS = ("1x1", *SMALL_LAYOUTS * 6, "2x4", "1x8")
"""From small to large, since shrinking prefers the first. One that is listed more often is drawn
more often: eight ranks are slow on few cores."""

LEAST_EXAMPLES = 3
"""The fewest examples of one big batch. In losses with positive examples, one in every three
examples is positive; without a positive one the loss would be 0 / 0."""

MOST_PER_RANK = 8
OTHER_SHARDS = ("sizes", "uneven", "one_example", "empty")
COMPARES: tuple[Compare, ...] = ("gradients", "update")


def search_suite(right: int, wrong: int, seed: int) -> Search[Trial]:
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
    search = Search[Trial]()
    try:
        for count, promised in ((right, True), (wrong, False)):
            _search_kind(search, count, promised, seed)
    except KeyboardInterrupt:
        search.stopped = "INTERRUPTED"
    return search


def _search_kind(search: Search[Trial], count: int, promised: bool, seed: int) -> None:
    drawn = draw_trials(count, promised, seed)
    trials = [trial for of_strategy in drawn.values() for trial in of_strategy]
    if trials:
        show(f"{len(trials)} random {'right cases' if promised else 'known differences'}")
    search.try_all(trials, lambda trial: trial.case.layout, run_trial)
    for strategy, of_strategy in drawn.items():
        search.shrink_all(
            random_trials(strategy),
            of_strategy,
            run_trial,
            lambda trial: _is_of_kind(trial, promised),
        )


def draw_trials(count: int, promised: bool, seed: int) -> dict[str, dict[Trial, tuple[int, ...]]]:
    """At most ``count`` trials, by strategy. All strategies have about the same number."""
    names = portable_strategies()
    each, left = divmod(count, len(names))
    drawn = {}
    for number, name in enumerate(names):
        share = each + (number < left)
        on_single_rank: list[Trial] = []

        def accept(trial: Trial, single: list[Trial] = on_single_rank, share: int = share) -> bool:
            if not _is_of_kind(trial, promised):
                return False
            if trial.case.layout == "1x1":
                single.append(trial)
            return trial.case.layout != "1x1" or len(single) <= 1 + share // SINGLE_RANK_SHARE

        drawn[name] = draw_different(random_trials(name), share, f"{seed} {name}", accept)
    return drawn


def portable_strategies() -> tuple[str, ...]:
    """The strategies that run on every machine."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.lane is None)


def _is_of_kind(trial: Trial, promised: bool) -> bool:
    """True for a trial that shows what it is to show.

    A known difference could as well have another cause if one rank has all data: the gradients of a
    mean, of a sum and of the big batch are then multiples of each other. So it is for several
    updates: if the first is wrong, the later ones start from wrong weights.
    """
    if promised or trial.cause is None:
        return promised and trial.cause is None
    case = trial.case
    indices = split(case.shards, case.catalogue_examples, case.ranks.world_size).indices
    with_data = indices[:-1] if case.shards == "no_valid_token" else indices
    several_updates = trial.compare == "update" and trial.steps != 1
    return sum(map(bool, with_data)) > 1 and not several_updates


def run_trial(trial: Trial) -> tuple[Judged, Verdict]:
    """Check the trial. It is judged rightly if the suite says what is known of it, or that it
    cannot tell.
    """
    verdict = check(trial.case, trial.strategy, **trial.options)
    expected = ("same", None) if trial.cause is None else ("different", trial.cause)
    right = verdict.outcome == "unknown" or (verdict.outcome, verdict.cause) == expected
    what = "False alarm" if trial.cause is None else f"Missed: {trial.cause}"
    kind = "" if right else f"{what} of {trial.strategy}"
    reason = verdict.cause or verdict.reason
    return Judged(verdict.outcome, reason, kind, _margin(verdict), verdict.repeat), verdict


def suite_report(search: Search[Trial]) -> Iterator[str]:
    """The tables, the report on the smallest case of each mistake, and a line that counts all."""
    right = {trial: one for trial, one in search.judged.items() if trial.cause is None}
    wrong = {trial: one for trial, one in search.judged.items() if trial.cause is not None}
    if right:
        head = ["random right cases", "cases", "same", "false alarms", "unknown", "error / limit"]
        names = {trial: f"{trial.strategy} {trial.case.dtype_name}" for trial in right}
        rows = _rows(right, names, ("same", "different", "unknown"))
        yield from columns([head, *([*row, worst] for row, worst in rows)])
    if wrong:
        head = ["random known differences", "cases", "caught", "named", "unknown"]
        names = {trial: str(trial.cause) for trial in wrong}
        rows = _rows(wrong, names, ("different", "named", "unknown"))
        yield from columns([head, *(row for row, _ in rows)])
    unknown = Counter(one.reason for one in search.judged.values() if one.outcome == "unknown")
    for reason, count in unknown.most_common():
        example = next(one for one in search.judged.values() if one.reason == reason)
        yield from (f"unknown, {count}: {reason}", f"  {example.repeat}")
    for _, judged, report in search.smallest:
        yield from ("", f"{judged.kind}, shrunk to the smallest case:", report.rstrip())
    yield ""
    if search.stopped:
        yield f"{search.stopped}: only the cases above were tried"
    false_alarms, misses = (sum(bool(one.kind) for one in of.values()) for of in (right, wrong))
    yield (
        f"{len(right)} random right cases: {false_alarms} false alarms; "
        f"{len(wrong)} random known differences: {misses} missed or misnamed"
    )


def _rows(
    judged: Mapping[Trial, Judged], names: Mapping[Trial, str], counted: Sequence[str]
) -> Iterator[tuple[list[object], str]]:
    """A row for each name and one for all, and the worst error over its limit where it is right."""
    for name in (*sorted(set(names.values())), "all"):
        row = [one for trial, one in judged.items() if name in ("all", names[trial])]
        counts = Counter(one.outcome for one in row)
        counts["named"] = sum(one.outcome == "different" and not one.kind for one in row)
        margins = [one.margin for one in row if one.margin is not None and one.outcome == "same"]
        worst = f"{max(margins):.2f}" if margins else "–"
        yield [name, len(row), *(counts[outcome] for outcome in counted)], worst


def as_json(search: Search[Trial]) -> dict[str, Any]:
    """The same results as values that can be written as JSON."""
    return {
        "stopped": search.stopped,
        "false_alarms": sum(
            bool(one.kind) and trial.cause is None for trial, one in search.judged.items()
        ),
        "misses": sum(
            bool(one.kind) and trial.cause is not None for trial, one in search.judged.items()
        ),
        "smallest": [{"repeat": one.repeat, "report": text} for _, one, text in search.smallest],
        "cases": [
            {
                "id": str(trial),
                "strategy": trial.strategy,
                "expected": trial.cause or "same",
                "outcome": one.outcome,
                "reason": one.reason,
                "error_over_limit": one.margin,
                "right": not one.kind,
                "repeat": one.repeat,
            }
            for trial, one in search.judged.items()
        ],
    }


def random_trials(strategy: str) -> Make[Trial]:
    """Trials of this strategy that can run on this machine, whether or not the strategy promises
    the big batch for them.

    A trial shrinks to few ranks, plain models and losses, few examples in equal shards, the
    gradients of one step, float64, seed 0.
    """
    of, some_in_turn = STRATEGIES[strategy], STRATEGIES[strategy].runs_forward_in_turn
    layouts = [name for name in LAYOUTS if _layout_suits(strategy, name)]
    models = [
        name
        for name, one in MODELS.items()
        # A strategy that runs forward in turn may happen to draw the masks of the big batch.
        if not one.only_exact and not (one.draws_random_numbers and some_in_turn)
    ]

    def make(draw: Draw) -> Trial:
        layout = draw.one_of(layouts)
        model = draw.one_of(models)
        loss = draw.one_of([name for name in LOSSES if go_together(MODELS[model], LOSSES[name])])
        world_size = parse(layout).world_size
        shards, examples = _trial_shards(draw, world_size, of.accumulates, model, loss)
        steps = _trial_steps(draw, world_size, model, shards, examples)
        compare, dtype = draw.one_of(COMPARES), draw.one_of(DTYPES)
        case = Case(
            model=model,
            loss=loss,
            layout=layout,
            shards=shards,
            dtype=dtype,
            seed=draw.integer(0, MOST_SEED),
            examples=examples,
        )
        on_gpu = MODELS[model].draws_random_numbers and _computes_on_gpus(case, strategy)
        return Trial(case, strategy, steps=steps, compare=compare, on_gpu=on_gpu)

    return make


def _layout_suits(step: object, layout: str) -> bool:
    """A strategy of one process needs one node, and more than one replica: with a single replica it
    would only call the module.
    """
    strategy, ranks = STRATEGIES.get(step) if isinstance(step, str) else None, parse(layout)
    one_process = strategy is not None and strategy.one_process
    return not one_process or (ranks.nodes == 1 and ranks.world_size > 1)


def _computes_on_gpus(case: Case, strategy: str) -> bool:
    try:
        lane = lane_of(case, STRATEGIES[strategy], settings.current().backend, ())
    except CannotRunHere:
        return False
    return lane.device_type != "cpu"


def _trial_shards(
    draw: Draw, world_size: int, accumulates: bool, model: str, loss: str
) -> tuple[str, int]:
    """The shards, and the number of examples in the big batch."""
    of_few = LOSSES[loss].batch_coupled == "statistic_not_additive"  # the root of one is no root
    coupled = MODELS[model].batch_coupled or of_few
    on_tokens = LOSSES[loss].output == "tokens"
    even = [name for name in EVEN_SHARDS if name != "no_valid_token" or on_tokens]
    # What couples examples gets equal shards, so that only one thing differs.
    shards = draw.one_of(["equal"] if coupled else [*even, *OTHER_SHARDS])
    if shards in EVEN_SHARDS:
        # A statistic of one example is none.
        least = max(2 if coupled else 1, -(-LEAST_EXAMPLES // world_size))
        each = draw.integer(least, MOST_PER_RANK)
        if accumulates:
            each *= MICRO_BATCHES if coupled else draw.one_of((1, MICRO_BATCHES))
        return shards, each * world_size
    if shards != "sizes":
        return shards, draw.integer(LEAST_EXAMPLES, MOST_PER_RANK * world_size)
    sizes = [draw.integer(0, MOST_PER_RANK) for _ in range(world_size)]
    sizes[-1] += max(0, LEAST_EXAMPLES - sum(sizes))
    return "+".join(map(str, sizes)), sum(sizes)


def _trial_steps(draw: Draw, world_size: int, model: str, shards: str, examples: int) -> Steps:
    """The number of big batches if all have the same size; otherwise the size of each."""
    count = draw.integer(1, MOST_STEPS)
    one_size = shards not in NAMED_SIZES or bool(MODELS[model].batch_coupled)
    if count == 1 or one_size or not draw.one_of((False, True)):
        return count
    unit = world_size if shards in EVEN_SHARDS else 1
    least = -(-LEAST_EXAMPLES // unit)
    most = max(least, examples // unit)
    return (examples, *(unit * draw.integer(least, most) for _ in range(count - 1)))


# Variations of a user's own case: other fields, while the user's code stays as it is.

OWN_LAYOUTS = ("1x1", "1x2", "2x1", "1x3", "1+2", "1x4", "2x2", "1+3")
"""From small to large, since shrinking prefers the first."""

CATALOGUE_EXAMPLES = 16
"""The most examples of a batch if the catalogue makes it. Such a batch has no size of its own."""

MOST_POSITIONS = 24
"""A variation with at most this many examples may take them at any positions of the batch. If it
has more, they are the first ones of the batch."""

DEADLINE = 20.0
"""The seconds that the ranks get for one case if the caller gives no deadline. They are few,
because a search runs many cases."""

EXPLANATIONS = {
    "same": "the gradients of one big batch",
    "different": "not the big batch",
    "failed": "the ranks failed: nothing was compared",
    "unknown": "could not be judged",
    "refused": "cannot be run, and was left out",
}


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

    def of(self, case: Case) -> Case:
        """The case with the fields of this variation. Raises BadCase if it cannot have them."""
        varied = replace(
            case, layout=self.layout, shards=self.shards, dtype=self.dtype, seed=self.seed
        )
        return varied if self.examples is None else build.with_examples(varied, self.examples)


class OwnCase:
    """A user's case, in which everything may vary that the caller has not given.

    ``given``: fields of the case and ``examples``, from the command line. The code of a trainer
    (``compare="update"``) fixes how many ranks there are and how many examples each step has, so
    these do not vary. Raises BadCase if no variation could run.
    """

    def __init__(self, user_check: UserCheck, given: Mapping[str, Any]) -> None:
        self.case, self._step, self._given = user_check.case, user_check.step, given
        case, options = user_check.case, user_check.options
        trains = options.get("compare") == "update"
        self._steps: Steps | None = options.get("steps", 1 if trains else None)
        of_sizes = isinstance(self._steps, tuple)
        keeps_shards = trains or of_sizes or case.shards == OWN
        self._shards: str | None = given.get("shards", case.shards if keeps_shards else None)
        self._examples: build.ExampleSubset | None = given.get("examples")
        self._takes_all = trains or of_sizes or self._examples is not None
        self._by_position = case.batch is not None
        self._available = build.examples_in(case) if self._by_position else CATALOGUE_EXAMPLES
        if self._examples is not None:
            build.with_examples(case, self._examples)  # raises BadCase if the batch has fewer
            taken = self._examples
            self._available = taken if isinstance(taken, int) else len(taken)
        self._layouts = [given["layout"]] if "layout" in given else self._suitable_layouts(trains)
        if not self._layouts:
            right = (
                f"shards for as many ranks as one of these layouts has: {', '.join(OWN_LAYOUTS)}"
            )
            raise BadCase("shards", self._shards, right)
        any_dtype = list(dict.fromkeys([*DTYPES, case.dtype]))
        self._dtypes = [given["dtype"]] if "dtype" in given else any_dtype

    def _suitable_layouts(self, trains: bool) -> list[str]:
        def suits(name: str) -> bool:
            world_size = parse(name).world_size
            if trains and world_size != self.case.ranks.world_size:
                return False
            if self._shards is not None:
                try:
                    explicit_sizes(self._shards, world_size)
                except BadCase:
                    return False
            return _layout_suits(self._step, name)

        names = dict.fromkeys([*OWN_LAYOUTS, self.case.layout])
        return sorted(filter(suits, names), key=lambda name: parse(name).world_size)

    def variation(self, draw: Draw) -> Variation:
        """Shrinks to few ranks, equal shards, few examples from the start of the batch, one step,
        float64, seed 0.
        """
        layout = draw.one_of(self._layouts)
        steps = draw.one_of(self._counts_of_steps()) if self._steps is None else self._steps
        batches = steps if self._by_position and isinstance(steps, int) else 1
        most = max(1, self._available // batches)
        shards, each = self._shards_and_examples(draw, parse(layout).world_size, most)
        taken = self._examples if self._takes_all else self._taken(draw, each * batches)
        seed = self._given.get("seed")
        return Variation(
            layout,
            shards,
            taken,
            draw.one_of(self._dtypes),
            draw.integer(0, MOST_SEED) if seed is None else seed,
            steps,
        )

    def _counts_of_steps(self) -> list[int]:
        counts = [n for n in range(1, MOST_STEPS + 1) if n <= self._available]
        if self._takes_all:
            counts = [n for n in counts if self._available % n == 0]
        if self._by_position and self._shards is not None and "+" in self._shards:
            # The shards name the sizes of one step.
            sizes = sum(map(int, self._shards.split("+")))
            fits = not self._takes_all
            counts = [n for n in counts if fits and n * sizes <= self._available] or [1]
        return counts

    def _shards_and_examples(self, draw: Draw, world_size: int, most: int) -> tuple[str, int]:
        """The shards of one big batch, and its number of examples: at most ``most``."""
        least = most if self._takes_all else 1
        if self._shards is not None:
            sizes = explicit_sizes(self._shards, world_size)
            if sizes is not None:
                return self._shards, sum(sizes)
            unit = 1 if self._takes_all or self._shards not in EVEN_SHARDS else world_size
            return self._shards, unit * draw.integer(least, max(1, most // unit))
        kinds = []
        if most >= world_size and not (self._takes_all and most % world_size):
            kinds += ["equal", "interleaved"] if world_size > 1 else ["equal"]
        if world_size > 1:
            # Uneven ones are drawn more often, because most faults show on them.
            kinds += [*["uneven"] * 3, "empty"] if most > world_size else ["empty"]
        kind = draw.one_of(kinds)
        if kind in EVEN_SHARDS:
            each = most // world_size
            return kind, world_size * draw.integer(each if self._takes_all else 1, each)
        empty = draw.integer(0, world_size - 1) if kind == "empty" else None
        full = [rank for rank in range(world_size) if rank != empty]
        left = total = draw.integer(max(len(full), least), max(len(full), most))
        sizes_of = dict.fromkeys(range(world_size), 0)
        for number, rank in enumerate(full, start=1):
            room = left - (len(full) - number)
            sizes_of[rank] = room if number == len(full) else draw.integer(1, room)
            left -= sizes_of[rank]
        return "+".join(map(str, sizes_of.values())), total

    def _taken(self, draw: Draw, count: int) -> build.ExampleSubset:
        """The first examples of the batch, or examples at any positions in any order."""
        if not self._by_position or count > MOST_POSITIONS or draw.one_of((True, False)):
            return count
        left = list(range(self._available))
        return tuple(
            left.pop(draw.integer(0, len(left) - 1)) for _ in range(min(count, self._available))
        )


def search_variations(
    user_check: UserCheck,
    given: Mapping[str, Any],
    wanted: int,
    repeat: Callable[[Variation], str] = str,
) -> Search[Variation]:
    """Try ``wanted`` variations of the user's case, and shrink those whose outcome is not "same".

    ``repeat`` writes the command that repeats one. Ctrl-C ends the search, which then returns the
    results so far. Raises BadCase if no variation can run at all.
    """
    own = OwnCase(user_check, given)
    show(f"{wanted} variations of {own.case}")
    refused: list[BadCase] = []

    def run(variation: Variation) -> tuple[Judged, Verdict | BadCase]:
        options = {"deadline": DEADLINE, **user_check.options, "steps": variation.steps}
        # A hang gets no second look here, but when somebody repeats the case.
        with settings.using(settings.replaced(repeat=repeat(variation), second_look=False)):
            try:
                verdict = check(variation.of(own.case), user_check.step, **options)
            except BadCase as error:
                refused.append(error)
                return Judged("refused", str(error), ""), error
        if verdict.failure is not None:
            reason = _kind_of_failure(verdict)
            return Judged("failed", reason, f"failed: {reason}"), verdict
        kind = "" if verdict.outcome == "same" else verdict.outcome
        return Judged(verdict.outcome, verdict.cause or verdict.reason, kind), verdict

    search = Search[Variation]()
    drawn = draw_different(own.variation, wanted, "0")
    try:
        search.try_all(list(drawn), lambda one: one.layout, run)
        if refused and len(refused) == len(search.judged):
            raise refused[0]
        # An empty shard can be the reason by itself.
        search.shrink_all(own.variation, drawn, run, lambda one: "0" not in one.shards.split("+"))
    except KeyboardInterrupt:
        search.stopped = "interrupted"
    return search


def _kind_of_failure(verdict: Verdict) -> str:
    """The kind of a failure, in words that are the same for every case with such a failure."""
    failure = verdict.failure
    if failure is None or isinstance(failure, RanksTimedOut):
        return TIMED_OUT
    if not failure.ends:
        return verdict.reason
    end = failure.ends[0]
    return f"{verdict.reason}: {end.what.partition(':')[0] or end.kind}"


def explore_variations(
    user_check: UserCheck,
    given: Mapping[str, Any],
    wanted: int,
    target: str,
    options: Mapping[str, Any],
) -> str:
    """Vary a user's own case and print the results. Returns "same", "different" or "unknown".

    ``given``: fields of the case from the command line. ``target``: the file and step, as the
    command line has them. ``options``: its other options, for the line that repeats a case.
    """

    def repeat(variation: Variation) -> str:
        words = ["ddp-equivalence", "check", target]
        words += ["--layout", variation.layout, "--shards", variation.shards]
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
        return shlex.join(words)

    search = search_variations(user_check, given, wanted, repeat)
    for line in variations_report(search):
        show(line)
    outcomes = {judged.outcome for judged in search.judged.values()}
    if "different" in outcomes:
        return "different"
    return "same" if outcomes <= {"same", "refused"} and not search.stopped else "unknown"


def variations_report(search: Search[Variation]) -> Iterator[str]:
    """A count of every outcome, and the report on each smallest case that the search has found."""
    for outcome, explanation in EXPLANATIONS.items():
        results = [judged for judged in search.judged.values() if judged.outcome == outcome]
        if results:
            yield f"{len(results):>5} {outcome:<10} {explanation}"
            reasons = Counter(judged.reason for judged in results if judged.reason)
            for reason, count in reasons.most_common():
                yield f"        {count:>5} {reason.splitlines()[0]}"
    if search.stopped:
        yield f"  {search.stopped}: some variations were not tried"
    for variation, judged, report in search.smallest:
        case = f"{variation.layout}, shards {variation.shards}"
        yield from ("", f"The smallest case that is {judged.outcome}: {case}", "", report.rstrip())
