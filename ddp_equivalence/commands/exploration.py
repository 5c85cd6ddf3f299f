"""Search random cases for those that are judged wrongly, and make one of each kind smaller.

The cases are those of the suite (``explore``), or variations of a user's own (``check --explore``).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
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
from ddp_equivalence.commands.user_file import UserCheck
from ddp_equivalence.measurement.request import lane_of
from ddp_equivalence.ranks.failure import RanksTimedOut
from ddp_equivalence.ranks.lanes import CannotRunHere
from ddp_equivalence.report.verdict import Verdict
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import Trial, can_train
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES

SEEDS = range(100_000)
DTYPES = (torch.float64, torch.float32)
EVEN_SHARDS = ("equal", "interleaved", "no_valid_token")
"""Shards with the same number of examples on every rank."""

DRAWS_PER_VALUE = 2000
"""The most draws for each value that is wanted. Many are refused, because their fields do not go
together."""

SECONDS = 60.0
"""After this time the smallest case so far is taken: a case that hangs takes its whole deadline."""

TIMED_OUT = "ranks timed out"
MOST_TIMEOUTS = 3
"""A search stops after this many cases that time out, because each takes its whole deadline."""

EXPLANATIONS = {
    "same": "the gradients of one big batch",
    "different": "not the big batch",
    "failed": "the ranks failed: nothing was compared",
    "unknown": "could not be judged",
    "refused": "cannot be run, and was left out",
}
"""Outcome -> its meaning, in the order in which outcomes are reported."""

Value = TypeVar("Value", bound=Hashable)
Point = tuple[int, ...]
"""Of each field of a space, the number of its value."""


@dataclass(frozen=True)
class Space(Generic[Value]):
    """All values that can be made of some fields.

    ``fields``: the values of each field, the simplest first. ``make`` is called with one value of
    each, and returns None if they do not go together.
    """

    fields: Sequence[Sequence[Any]]
    make: Callable[..., Value | None]

    def at(self, point: Point) -> Value | None:
        """The value that is made of these numbers."""
        return self.make(*(values[n] for values, n in zip(self.fields, point, strict=True)))

    def draw(self, wanted: int, seed: str) -> dict[Value, tuple[Space[Value], Point]]:
        """``wanted`` different values, and where they are in this space; fewer if they are rare."""
        random, drawn = Random(seed), dict[Value, tuple[Space[Value], Point]]()
        for _ in range(DRAWS_PER_VALUE * wanted):
            if len(drawn) == wanted:
                break
            point = tuple(random.randrange(len(values)) for values in self.fields)
            value = self.at(point)
            if value is not None:
                drawn.setdefault(value, (self, point))
        return drawn

    def smallest(self, point: Point, judge: Callable[[Value], Judged], kind: str) -> Value:
        """Move from this point to simpler ones, a field at a time, that are wrong in this way."""
        until, held = time.monotonic() + SECONDS, dict[Value | None, bool]({None: False})
        place = since_moved = 0
        while since_moved < len(point) and time.monotonic() < until:
            number = point[place]
            for simpler in sorted({0, number // 2, max(0, number - 1)} - {number}):
                candidate = (*point[:place], simpler, *point[place + 1 :])
                value = self.at(candidate)
                if value is not None and value not in held:
                    held[value] = judge(value).wrong == kind
                if held[value]:
                    point, since_moved = candidate, 0
                    break
            else:
                place, since_moved = (place + 1) % len(point), since_moved + 1
        smallest = self.at(point)
        assert smallest is not None
        return smallest


@dataclass(frozen=True)
class Judged:
    """The result of one value.

    ``outcome``: that of the verdict, "failed" if ranks failed, or "refused" if ``check`` refused
    the case. ``reason``: the cause, or why nothing was shown. ``wrong``: the kind of what is not as
    it should be, of which one value is made smaller; "" if it is judged rightly.
    """

    outcome: str
    reason: str
    wrong: str = ""
    repeat: str = ""
    report: str = ""


@dataclass
class Search(Generic[Value]):
    """``layout`` and ``judge``: of a value. ``judged``: the results so far. ``smallest``: of each
    kind that is wrong. ``stopped``: why the search stopped before its end, or "".
    """

    layout: Callable[[Value], str]
    judge: Callable[[Value], Judged]
    judged: dict[Value, Judged] = field(default_factory=dict)
    smallest: list[tuple[Value, Judged]] = field(default_factory=list)
    stopped: str = ""

    def try_all(self, drawn: Mapping[Value, tuple[Space[Value], Point]]) -> None:
        """Judge the values, layout after layout, so that ranks are started once for each. Then
        make one value of each kind that is wrong as small as it can be. Ctrl-C ends the search.
        """
        try:
            self._judge_all(drawn)
            for kind in sorted({one.wrong for one in self.judged.values()} - {""}):
                of_kind = [drawn[value] for value, one in self.judged.items() if one.wrong == kind]
                space, point = min(of_kind, key=lambda at: at[1])
                smallest = space.smallest(point, self.judge, kind)
                self.smallest.append((smallest, self.judge(smallest)))
        except KeyboardInterrupt:
            self.stopped = "interrupted"

    def _judge_all(self, values: Iterable[Value]) -> None:
        timeouts = 0
        by_layout = sorted(values, key=self.layout)
        by_layout.sort(key=lambda value: parse(self.layout(value)).world_size)
        for layout, of_layout in groupby(by_layout, self.layout):
            counts = Counter[str]()
            for value in of_layout:
                self.judged[value] = judged = self.judge(value)
                counts[judged.outcome] += 1
                timeouts += judged.reason == TIMED_OUT
                if timeouts == MOST_TIMEOUTS:
                    self.stopped = f"stopped after {MOST_TIMEOUTS} cases that timed out"
                    return
            text = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
            print(f"  {layout:<16}{counts.total():>5}    {text}", flush=True)

    def report(self) -> Iterator[str]:
        """A count of every outcome, and the report on each smallest case."""
        for outcome, explanation in EXPLANATIONS.items():
            results = [judged for judged in self.judged.values() if judged.outcome == outcome]
            if results:
                yield f"{len(results):>5} {outcome:<10} {explanation}"
            for reason, count in Counter(one.reason for one in results if one.reason).most_common():
                yield f"        {count:>5} {reason.splitlines()[0]}"
                example = next(one for one in results if one.reason == reason)
                if outcome == "unknown" and example.repeat:
                    yield f"              such as {example.repeat}"
        if self.stopped:
            yield f"  {self.stopped}: some cases were not tried"
        for value, judged in self.smallest:
            yield from ("", f"The smallest case that is {judged.wrong}: {value}", "")
            yield judged.report.rstrip()


def _judged(verdict: Verdict, wrong: str, outcome: str = "", reason: str = "") -> Judged:
    """The result of a value with this verdict. ``outcome``, ``reason``: "" for those it has."""
    return Judged(
        outcome or verdict.outcome,
        reason or verdict.cause or verdict.reason,
        wrong,
        verdict.repeat,
        str(verdict) if wrong else "",
    )


def _layout_suits(step: object, layout: str) -> bool:
    """A strategy of one process needs one node, and more than one replica: with a single replica it
    would only call the module. One with a mesh of nodes needs nodes with equally many ranks, or
    several of them. A slow one gets two ranks.
    """
    strategy, ranks = STRATEGIES.get(step) if isinstance(step, str) else None, parse(layout)
    if strategy is None:
        return True
    if strategy.needs_even_nodes and not ranks.has_even_nodes:
        return False
    if strategy.needs_several_nodes and ranks.nodes == 1:
        return False
    if strategy.compiles and ranks.world_size > 2:
        return False
    return not strategy.one_process or (ranks.nodes == 1 and ranks.world_size > 1)


# Random trials of the suite, far more than the catalogue contains.

LAYOUTS = (
    *("1x1", "1x2", "2x1", "1x3", "3x1", "1+2", "2+1", "1x4", "2x2", "4x1", "1+3", "3+1"),
    *("1+2+1", "2x2-round-robin", "1+2-round-robin", "2x4", "1x8"),
)

LEAST_EXAMPLES = 3
"""The fewest examples of one big batch. In losses with positive examples, one in every three
examples is positive; without a positive one the loss would be 0 / 0."""

EXAMPLES = range(LEAST_EXAMPLES, 48)
COMPARES: tuple[Compare, ...] = ("gradients", "update")
SHORTER_LAST = "shorter_last"
"""Two steps, of which the second one has the fewest examples that are possible."""


def search_suite(right: int, wrong: int, seed: int) -> Search[Trial]:
    """Try ``right`` random trials on which the big batch is promised, and ``wrong`` known
    differences. The trials are the same for the same seed.

    Raises BadCase for a number below 0, or if there is nothing to try.
    """
    for name, count in (("right", right), ("wrong", wrong), ("seed", seed)):
        if count < 0:
            raise BadCase(name, count, "an integer from 0")
    if not right + wrong:
        raise BadCase("right", 0, "a number of cases above 0, if wrong is 0 too")
    search = Search[Trial](lambda trial: trial.case.layout, run_trial)
    drawn = dict[Trial, tuple[Space[Trial], Point]]()
    names = portable_strategies()
    for count, promised in ((right, True), (wrong, False)):
        for number, name in enumerate(names):
            share = count // len(names) + (number < count % len(names))
            drawn |= random_trials(name, promised).draw(share, f"{seed} {name}")
    print(f"{len(drawn)} random cases", flush=True)
    search.try_all(drawn)
    return search


def portable_strategies() -> tuple[str, ...]:
    """The strategies that run on every machine."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.lane is None)


def run_trial(trial: Trial) -> Judged:
    """Check the trial. It is judged rightly if the suite says what is known of it, or that it
    cannot tell.
    """
    verdict = check(trial.case, trial.strategy, **trial.options)
    is_right = verdict.outcome == ("same" if trial.cause is None else "different")
    is_right = is_right and verdict.cause == trial.cause
    kind = "a false alarm" if trial.cause is None else f"not called {trial.cause}"
    wrong = not is_right and verdict.outcome != "unknown"
    return _judged(verdict, f"{kind}, of {trial.strategy}" if wrong else "")


def closing_line(search: Search[Trial]) -> str:
    """How many trials were judged wrongly."""
    counts = []
    for promised, kind, what in (
        (True, "right cases", "false alarms"),
        (False, "known differences", "missed or misnamed"),
    ):
        of = [one for trial, one in search.judged.items() if (trial.cause is None) == promised]
        counts.append(f"{len(of)} random {kind}: {sum(bool(one.wrong) for one in of)} {what}")
    return "; ".join(counts)


def as_json(search: Search[Trial]) -> dict[str, Any]:
    """The results as values that can be written as JSON."""
    cases = [
        vars(one) | {"id": str(trial), "strategy": trial.strategy, "expected": trial.cause}
        for trial, one in search.judged.items()
    ]
    return {"stopped": search.stopped, "summary": closing_line(search), "cases": cases}


def random_trials(strategy: str, promised: bool) -> Space[Trial]:
    """Trials of this strategy that can run on this machine, and on which the big batch is promised,
    or is not.
    """
    of = STRATEGIES[strategy]

    def make(
        pair: tuple[str, str], layout: str, shards: str, examples: int, steps: Any, *others: Any
    ) -> Trial | None:
        model, loss, (compare, dtype, seed) = MODELS[pair[0]], LOSSES[pair[1]], others
        # A statistic of few examples is none, and the root of one is no root. What couples examples
        # gets equal shards, so that only one thing differs.
        coupled = bool(model.batch_coupled) or loss.batch_coupled == "statistic_not_additive"
        unit = parse(layout).world_size if shards in EVEN_SHARDS else 1
        unit *= MICRO_BATCHES if coupled and of.accumulates else 1
        least = max(2 * unit if coupled else unit, -(-LEAST_EXAMPLES // unit) * unit)
        examples -= examples % unit
        if (
            examples < least
            or (coupled and shards != "equal")
            or (shards == "no_valid_token" and loss.output != "tokens")
            or (steps == SHORTER_LAST and (coupled or examples == least))
        ):
            return None
        by_step: Steps = (examples, least) if steps == SHORTER_LAST else steps
        of_case = {"layout": layout, "shards": shards, "examples": examples, "dtype": dtype}
        case = Case(model=model.name, loss=loss.name, seed=seed, **of_case)
        on_gpu = model.draws_random_numbers and _computes_on_gpus(case, strategy)
        trial = Trial(case, strategy, steps=by_step, compare=compare, on_gpu=on_gpu)
        return trial if _shows(trial, promised) else None

    pairs = [
        (name, loss)
        for (name, model), loss in product(MODELS.items(), LOSSES)
        if not model.only_exact and can_train(of, model, LOSSES[loss])
        # A strategy that runs forward in turn may happen to draw the masks of the big batch.
        if not (model.draws_random_numbers and of.runs_forward_in_turn)
    ]
    layouts = [name for name in LAYOUTS if _layout_suits(strategy, name)]
    steps = (1, 2, 3, SHORTER_LAST)
    of_batch = (list(NAMED_SIZES), EXAMPLES, steps)
    compares = COMPARES[1:] if of.trains else COMPARES
    return Space((pairs, layouts, *of_batch, compares, DTYPES, SEEDS), make)


def _shows(trial: Trial, promised: bool) -> bool:
    """True for a trial that shows what it is to show.

    A known difference could as well have another cause if one rank has all data: the gradients of a
    mean, of a sum and of the big batch are then multiples of each other. So it is for several
    updates: if the first is wrong, the later ones start from wrong weights.
    """
    if promised or trial.cause is None:
        return promised and trial.cause is None
    case = trial.case
    indices = split(case.shards, case.catalogue_examples, case.ranks.world_size).indices
    if STRATEGIES[trial.strategy].ends_without_examples and not all(indices):
        return False
    with_data = indices[:-1] if case.shards == "no_valid_token" else indices
    several_updates = trial.compare == "update" and trial.steps != 1
    return sum(map(bool, with_data)) > 1 and not several_updates


def _computes_on_gpus(case: Case, strategy: str) -> bool:
    try:
        lane = lane_of(case, STRATEGIES[strategy], settings.current().backend, ())
    except CannotRunHere:
        return False
    return lane.device_type != "cpu"


# Variations of a user's own case: other fields, while the user's code stays as it is.

OWN_LAYOUTS = ("1x1", "1x2", "2x1", "1x3", "1+2", "1x4", "2x2", "1+3")
OWN_SHARDS = ("equal", "interleaved", *["uneven"] * 3, "one_example", "empty")
"""Uneven ones are drawn more often, because most faults show on them. An empty shard, which can be
the reason for a failure by itself, comes last."""

CATALOGUE_EXAMPLES = 16
"""The most examples of a batch if the catalogue makes it. Such a batch has no size of its own."""

DEADLINE = 20.0
"""The seconds that the ranks get for one case if the caller gives no deadline. They are few,
because a search runs many cases."""


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

    def __str__(self) -> str:
        return f"{self.layout}, shards {self.shards}"

    def of(self, case: Case) -> Case:
        """The case with the fields of this variation. Raises BadCase if it cannot have them."""
        varied = replace(
            case, layout=self.layout, shards=self.shards, dtype=self.dtype, seed=self.seed
        )
        return varied if self.examples is None else build.with_examples(varied, self.examples)


def variations(user_check: UserCheck, given: Mapping[str, Any]) -> Space[Variation]:
    """All variations of a user's case, in everything that the caller has not given.

    ``given``: fields of the case and ``examples``, from the command line. The code of a trainer
    (``compare="update"``) fixes how many ranks there are and how many examples each step has, so
    these do not vary.
    """
    case, options = user_check.case, user_check.options
    trains, by_position = options.get("compare") == "update", case.batch is not None
    steps: Steps | None = options.get("steps", 1 if trains else None)
    keeps = trains or isinstance(steps, tuple)
    shards = given.get("shards", case.shards if keeps or case.shards == OWN else None)
    examples: build.ExampleSubset | None = given.get("examples")
    takes_all, available = keeps or examples is not None, CATALOGUE_EXAMPLES
    if by_position or examples is not None:
        of_case = case if examples is None else build.with_examples(case, examples)
        available = build.examples_in(of_case)
    layouts = [
        name
        for name in dict.fromkeys([*OWN_LAYOUTS, case.layout])
        if not trains or parse(name).world_size == case.ranks.world_size
        if _layout_suits(user_check.step, name)
    ]

    def make(of_shards: str, layout: str, each: int, *others: Any) -> Variation | None:
        """``each``: the examples of one step, as far as nothing else decides on them."""
        (of_steps, dtype, seed), ranks = others, parse(layout).world_size
        batches = of_steps if by_position and isinstance(of_steps, int) else 1
        try:
            sizes = explicit_sizes(of_shards, ranks)
            if takes_all:
                each = available // batches if available % batches == 0 else 0
            elif sizes is not None:
                each = sum(sizes)
            elif of_shards in EVEN_SHARDS:
                each -= each % ranks
            is_tried = shards is None or ("+" in shards and isinstance(of_steps, int))
            dealt = split(of_shards, each, ranks).sizes if is_tried else ()
        except BadCase:  # they are those of another number of ranks, or of examples
            return None
        if not 0 < each * batches <= available:
            return None
        # The shards must be what their name says. On one rank all are alike, and one is enough.
        alike = ranks == 1 and of_shards != "equal"
        if shards is None and (alike or dealt.count(0) != (of_shards == "empty")):
            return None
        taken = examples if takes_all else each * batches
        return Variation(layout, of_shards, taken, dtype, seed, of_steps)

    fields = {
        "shards": OWN_SHARDS if shards is None else [shards],
        "layout": sorted(layouts, key=lambda name: parse(name).world_size),
        "each": range(1, available + 1),
        "steps": (1, 2, 3) if steps is None else [steps],
        "dtype": list(dict.fromkeys([*DTYPES, case.dtype])),
        "seed": SEEDS,
    }
    held = {name: [given[name]] for name in ("layout", "dtype", "seed") if name in given}
    return Space(list((fields | held).values()), make)


def search_variations(
    user_check: UserCheck,
    given: Mapping[str, Any],
    wanted: int,
    repeat: Callable[[Variation], str] = str,
) -> Search[Variation]:
    """Try ``wanted`` variations of the user's case, and make those smaller that are not "same".

    ``repeat`` writes the command that repeats one. Raises BadCase if no variation can run at all.
    """
    case, space = user_check.case, variations(user_check, given)
    refused: list[BadCase] = []

    def judge(variation: Variation) -> Judged:
        options = {"deadline": DEADLINE, **user_check.options, "steps": variation.steps}
        # A hang gets no second look here, but when somebody repeats the case.
        with settings.using(settings.replaced(repeat=repeat(variation), second_look=False)):
            try:
                verdict = check(variation.of(case), user_check.step, **options)
            except BadCase as error:
                refused.append(error)
                return Judged("refused", str(error))
        if verdict.failure is None:
            return _judged(verdict, "" if verdict.outcome == "same" else verdict.outcome)
        reason, ends = verdict.reason, verdict.failure.ends
        if ends and not isinstance(verdict.failure, RanksTimedOut):
            # The kind of the error, in words that are the same for every case that raises it.
            reason += f": {ends[0].what.partition(':')[0]}"
        return _judged(verdict, f"failed ({reason})", "failed", reason)

    search = Search[Variation](lambda one: one.layout, judge)
    drawn = space.draw(wanted, "0")
    if not drawn:
        for shards, layout in product(*space.fields[:2]):
            explicit_sizes(shards, parse(layout).world_size)  # raises BadCase if it cannot be
        right = "left out: there are too few examples for the ranks and steps that are given"
        raise BadCase("explore", wanted, right)
    print(f"{len(drawn)} variations of {case}", flush=True)
    search.try_all(drawn)
    if refused and {one.outcome for one in search.judged.values()} == {"refused"}:
        raise refused[0]
    return search
