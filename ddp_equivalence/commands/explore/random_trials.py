"""Random trials of the suite: what the catalogue could hold, and much that it does not."""

from __future__ import annotations

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.shards import NAMED_SIZES, split
from ddp_equivalence.case.steps import Compare, Steps
from ddp_equivalence.commands.explore.engine import number, one_of, strategies
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.lanes import choose
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import Trial, go_together
from ddp_equivalence.strategies.sharded_batch import MICRO_BATCHES

SMALL_LAYOUTS = (
    *("1x2", "2x1", "1x3", "3x1", "1+2", "2+1", "1x4", "2x2", "4x1", "1+3", "3+1"),
    *("1+2+1", "2x2-round-robin", "1+2-round-robin"),
)
"""Beside the catalogue's: three ranks, three nodes. From small to large, as shrinking goes."""

LAYOUTS = ("1x1", *SMALL_LAYOUTS * 6, "1x1", "1x1", "2x4", "1x8")
"""As often as they are drawn: eight ranks are slow where cores are few, one shows little."""

LEAST_EXAMPLES = 3
"""Of one big batch: every third example is a positive one, and without any the loss is 0 / 0."""

MOST_FOR_A_RANK = 8
EVEN_DEALS = ("equal", "interleaved", "no_valid_token")
OTHER_DEALS = ("sizes", "uneven", "one_example", "empty")
DTYPES = (torch.float64, torch.float32)
COMPARES: tuple[Compare, ...] = ("gradients", "update")
MOST_STEPS = 3
MOST_SEED = 99_999


@strategies.composite
def trials(draw: strategies.DrawFn, strategy: str) -> Trial:
    """Any trial of this strategy that can run here, of what it promises and of what it does not.

    Shrinks towards few ranks, plain models and losses, few examples in equal shards, the gradients
    of one step, float64, seed 0.
    """
    layout = one_of(draw, [name for name in LAYOUTS if _has_room(strategy, name)])
    model = one_of(draw, [name for name in MODELS if _runs(name, strategy, layout)])
    loss = one_of(draw, [name for name in LOSSES if _fits(model, name)])
    world_size = parse(layout).world_size
    shards, examples = _deal(draw, world_size, strategy, model, loss)
    steps = _steps(draw, world_size, model, shards, examples)
    compare = one_of(draw, COMPARES)
    dtype = one_of(draw, DTYPES)
    seed = number(draw, 0, MOST_SEED)
    case = Case(
        model=model,
        loss=loss,
        layout=layout,
        shards=shards,
        dtype=dtype,
        seed=seed,
        examples=examples,
    )
    return Trial(case, strategy, steps=steps, compare=compare)


def strategies_here() -> tuple[str, ...]:
    """The strategies that run on every machine."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.lane is None)


def tells_its_cause(trial: Trial) -> bool:
    """False for a known difference that could as well be another one.

    Where all data is on one rank, its mean, its sum and the whole are multiples of each other.
    After a wrong first update the second shows nothing more.
    """
    case = trial.case
    indices = split(case.shards, case.catalogue_examples, case.ranks.world_size).indices
    telling = indices[:-1] if case.shards == "no_valid_token" else indices
    more_updates = trial.compare == "update" and trial.steps != 1
    return sum(map(bool, telling)) > 1 and not more_updates


def _deal(
    draw: strategies.DrawFn, world_size: int, strategy: str, model: str, loss: str
) -> tuple[str, int]:
    """A deal of examples, and how many there are in the big batch."""
    coupled = MODELS[model].batch_coupled
    on_tokens = LOSSES[loss].output == "tokens"
    even = [name for name in EVEN_DEALS if name != "no_valid_token" or on_tokens]
    # Of what couples examples one deal, so that one thing differs.
    shards = one_of(draw, ["equal"] if coupled else [*even, *OTHER_DEALS])
    if shards in EVEN_DEALS:
        # Batch norm has no statistics of a single example.
        least = max(2 if coupled else 1, -(-LEAST_EXAMPLES // world_size))
        each = number(draw, least, MOST_FOR_A_RANK)
        if STRATEGIES[strategy].accumulates:
            each *= MICRO_BATCHES if coupled else one_of(draw, (1, MICRO_BATCHES))
        return shards, each * world_size
    if shards != "sizes":
        return shards, number(draw, LEAST_EXAMPLES, MOST_FOR_A_RANK * world_size)
    sizes = [number(draw, 0, MOST_FOR_A_RANK) for _ in range(world_size)]
    sizes[-1] += max(0, LEAST_EXAMPLES - sum(sizes))
    return "+".join(map(str, sizes)), sum(sizes)


def _steps(
    draw: strategies.DrawFn, world_size: int, model: str, shards: str, examples: int
) -> Steps:
    """One big batch, some of one size, or some of their own sizes."""
    count = number(draw, 1, MOST_STEPS)
    one_size = shards not in NAMED_SIZES or bool(MODELS[model].batch_coupled)
    if count == 1 or one_size or not one_of(draw, (False, True)):
        return count
    unit = world_size if shards in EVEN_DEALS else 1
    least = -(-LEAST_EXAMPLES // unit)
    most = max(least, examples // unit)
    return (examples, *(unit * number(draw, least, most) for _ in range(count - 1)))


def _has_room(strategy: str, layout: str) -> bool:
    """One process has one node, and with one replica the module is just called."""
    ranks = parse(layout)
    return not STRATEGIES[strategy].one_process or (ranks.nodes == 1 and ranks.world_size > 1)


def _runs(model: str, strategy: str, layout: str) -> bool:
    one_process = STRATEGIES[strategy].one_process
    if MODELS[model].only_exact:
        return False
    if MODELS[model].draws_random_numbers and STRATEGIES[strategy].runs_forward_in_turn:
        return False  # It may happen to draw the same masks as the big batch.
    on_nccl = not one_process and choose(parse(layout)).backend in NCCL_BACKENDS
    return not (MODELS[model].sparse_gradients and on_nccl)


def _fits(model: str, loss: str) -> bool:
    return go_together(MODELS[model], LOSSES[loss])
