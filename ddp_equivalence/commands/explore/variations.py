"""Draw variations of a user's own case: other fields, while the user's code stays as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ddp_equivalence.case import example_subset
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.shards import explicit_sizes
from ddp_equivalence.case.steps import Steps
from ddp_equivalence.commands.explore.drawing import integer, one_of, strategies
from ddp_equivalence.commands.explore.search_space import SearchSpace

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
    examples: example_subset.ExampleSubset | None
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
        return (
            varied if self.examples is None else example_subset.with_examples(varied, self.examples)
        )


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


def _examples(
    draw: strategies.DrawFn, space: SearchSpace, count: int
) -> example_subset.ExampleSubset:
    """The first examples of the batch, or examples at any positions in any order."""
    if not space.by_position or count > MOST_POSITIONS or one_of(draw, (True, False)):
        return count
    left = list(range(space.available))
    return tuple(
        left.pop(integer(draw, 0, len(left) - 1)) for _ in range(min(count, space.available))
    )
