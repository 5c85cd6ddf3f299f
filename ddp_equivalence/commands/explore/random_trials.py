"""Draw random trials of the suite, far more than the catalogue contains."""

from __future__ import annotations

import torch

from ddp_equivalence.case import settings
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import NAMED_SIZES, split
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.commands.explore.drawing import integer, one_of, strategies
from ddp_equivalence.measurement.lane_of_case import lane_of
from ddp_equivalence.ranks.lanes import CannotRunHere
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import Trial, go_together
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES

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
