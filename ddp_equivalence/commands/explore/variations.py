"""What can be varied about somebody's own case without touching their code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_equivalence.case import example_subset
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.shards import OWN, explicit_sizes
from ddp_equivalence.case.steps import Steps
from ddp_equivalence.commands.explore.engine import number, one_of, strategies
from ddp_equivalence.strategies import STRATEGIES

LAYOUTS = ("1x1", "1x2", "2x1", "1x3", "1+2", "1x4", "2x2", "1+3")
"""From small to large, as shrinking goes."""

DTYPES: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
MOST_STEPS = 3
MOST_SEED = 99_999
MOST_CHOSEN = 24
"""More examples than this are the first ones of the batch, fewer may be any."""

OF_THE_CATALOGUE = 16
"""The most examples of a batch that the catalogue makes: it has no size of its own."""

UNEVEN = ("uneven",) * 3
"""As often as it is drawn, beside one deal of every other kind: it finds most."""

DIVIDED = ("equal", "interleaved", "no_valid_token")
"""Deals of as many examples to every rank."""


@dataclass(frozen=True)
class Variation:
    """One way to run the step. ``examples``: of all steps together; None for the case's own."""

    layout: str
    shards: str
    examples: example_subset.ExampleSubset | None
    dtype: torch.dtype | None
    seed: int
    steps: Steps

    @property
    def has_an_empty_shard(self) -> bool:
        return "0" in self.shards.split("+")

    def of(self, case: Case) -> Case:
        """The case in this variation. Raises BadCase if it cannot be varied so."""
        varied = replace(
            case, layout=self.layout, shards=self.shards, dtype=self.dtype, seed=self.seed
        )
        return (
            varied if self.examples is None else example_subset.with_examples(varied, self.examples)
        )


@dataclass(frozen=True)
class Space:
    """All variations of a case; None where a field may take any value.

    ``has``: how many examples there are to take from, or to take all of if ``takes_all``.
    """

    has: int
    takes_all: bool
    examples: example_subset.ExampleSubset | None
    layouts: tuple[str, ...]
    shards: str | None
    dtypes: tuple[torch.dtype | None, ...]
    seed: int | None
    steps: Steps | None
    by_position: bool


def space_of(case: Case, step: object, given: dict[str, Any], options: dict[str, Any]) -> Space:
    """All that the caller has not given himself.

    ``given``: fields of the case and ``examples``, from the command line; ``options``: arguments of
    ``check``. A trainer (``compare="update"``) knows how many examples each of its steps takes, and
    on how many ranks: these stay. Raises BadCase for what could never run.
    """
    trains = options.get("compare") == "update"
    steps = options.get("steps", 1 if trains else None)
    keeps_deal = trains or isinstance(steps, tuple) or case.shards == OWN
    shards = given.get("shards", case.shards if keeps_deal else None)
    layouts = (given["layout"],) if "layout" in given else _layouts(case, step, shards, trains)
    if not layouts:
        raise BadCase("shards", shards, f"a deal for the ranks of one of {', '.join(LAYOUTS)}")
    examples = given.get("examples")
    dtypes = (given["dtype"],) if "dtype" in given else tuple(dict.fromkeys([*DTYPES, case.dtype]))
    if examples is not None:
        example_subset.with_examples(case, examples)
        has = examples if isinstance(examples, int) else len(examples)
    else:
        has = example_subset.examples_in(case) if case.batch is not None else OF_THE_CATALOGUE
    return Space(
        has=has,
        takes_all=trains or isinstance(steps, tuple) or examples is not None,
        examples=examples,
        layouts=layouts,
        shards=shards,
        dtypes=dtypes,
        seed=given.get("seed"),
        steps=steps,
        by_position=case.batch is not None,
    )


@strategies.composite
def variations(draw: strategies.DrawFn, space: Space) -> Variation:
    """Any variation. Shrinks towards few ranks, equal shards and none empty, few examples, the
    first ones of the batch, one step, float64, seed 0.
    """
    layout = one_of(draw, space.layouts)
    steps = _steps(draw, space)
    batches = steps if space.by_position and isinstance(steps, int) else 1
    shards, each = _deal(draw, space, parse(layout).world_size, max(1, space.has // batches))
    taken = space.examples if space.takes_all else _chosen(draw, space, each * batches)
    dtype = one_of(draw, space.dtypes)
    seed = number(draw, 0, MOST_SEED) if space.seed is None else space.seed
    return Variation(layout, shards, taken, dtype, seed, steps)


def _layouts(case: Case, step: object, shards: str | None, trains: bool) -> tuple[str, ...]:
    strategy = STRATEGIES.get(step) if isinstance(step, str) else None
    found = []
    for name in dict.fromkeys([*LAYOUTS, case.layout]):
        ranks = parse(name)
        one_process = strategy is not None and strategy.one_process
        if one_process and (ranks.nodes > 1 or ranks.world_size == 1):
            continue
        if trains and ranks.world_size != case.ranks.world_size:
            continue
        if shards is None or _deals_to(shards, ranks.world_size):
            found.append(name)
    return tuple(sorted(found, key=lambda name: parse(name).world_size))


def _deals_to(shards: str, world_size: int) -> bool:
    try:
        explicit_sizes(shards, world_size)
    except BadCase:
        return False
    return True


def _steps(draw: strategies.DrawFn, space: Space) -> Steps:
    if space.steps is not None:
        return space.steps
    counts = [n for n in range(1, MOST_STEPS + 1) if n <= space.has]
    if space.takes_all:
        counts = [n for n in counts if space.has % n == 0]
    if space.shards is not None and "+" in space.shards and space.by_position:
        # Sizes are those of one step.
        sizes = sum(map(int, space.shards.split("+")))
        counts = [n for n in counts if n * sizes <= space.has and not space.takes_all] or [1]
    return one_of(draw, counts)


def _deal(draw: strategies.DrawFn, space: Space, world_size: int, most: int) -> tuple[str, int]:
    """The shards of one big batch, and its examples: at most ``most``, or all of them."""
    if space.shards is not None:
        return space.shards, _fitting(draw, space, world_size, most)
    kinds = []
    if most >= world_size and not (space.takes_all and most % world_size):
        kinds += ["equal", "interleaved"] if world_size > 1 else ["equal"]
    if world_size > 1:
        kinds += [*UNEVEN, "empty"] if most > world_size else ["empty"]
    kind = one_of(draw, kinds)
    if kind in DIVIDED:
        each = most // world_size
        return kind, world_size * (each if space.takes_all else number(draw, 1, each))
    least = 1 if kind == "uneven" else 0
    sizes: list[int] = []
    for others in reversed(range(world_size)):
        room = most - sum(sizes) - least * others
        sizes.append(number(draw, least, max(least, min(room, -(-2 * most // world_size)))))
    if kind == "empty":
        empty = number(draw, 0, world_size - 1)
        sizes[empty - 1] += max(sizes[empty] * space.takes_all, sum(sizes) == sizes[empty])
        sizes[empty] = 0
    if space.takes_all:
        sizes[sizes.index(max(sizes))] += most - sum(sizes)
    return "+".join(map(str, sizes)), sum(sizes)


def _fitting(draw: strategies.DrawFn, space: Space, world_size: int, most: int) -> int:
    """How many examples shards that are held can be dealt of."""
    sizes = explicit_sizes(str(space.shards), world_size)
    if sizes is not None:
        return sum(sizes)
    if space.takes_all:
        return most
    if space.shards in DIVIDED:
        return world_size * number(draw, 1, max(1, most // world_size))
    return number(draw, 1, most)


def _chosen(draw: strategies.DrawFn, space: Space, count: int) -> example_subset.ExampleSubset:
    """The first ones of the batch, or any in any order."""
    if not space.by_position or count > MOST_CHOSEN or one_of(draw, (True, False)):
        return count
    left = list(range(space.has))
    return tuple(left.pop(number(draw, 0, len(left) - 1)) for _ in range(min(count, space.has)))
