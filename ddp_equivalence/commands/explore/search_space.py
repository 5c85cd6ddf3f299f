"""Which properties of a user's own case may vary, and which stay as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ddp_equivalence.case import example_subset
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.shards import OWN, explicit_sizes
from ddp_equivalence.case.steps import Steps
from ddp_equivalence.strategies import STRATEGIES

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
    examples: example_subset.ExampleSubset | None
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
        example_subset.with_examples(case, examples)
        available = examples if isinstance(examples, int) else len(examples)
    else:
        own = case.batch is not None
        available = example_subset.examples_in(case) if own else CATALOGUE_EXAMPLES
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
