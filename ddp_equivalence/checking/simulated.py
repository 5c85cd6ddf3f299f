"""``simulate`` compares a step with the big batch on simulated ranks: its rule at a thousand ranks.

All ranks are threads of one process, see ``ddp_equivalence.ranks.simulated``. That shows who gets
which examples, what is divided by what, and which groups reduce. It shows nothing of a backend.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import psutil
import torch
from torch import Tensor

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model, build_whole_batch, loss_of
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import without_restoring_random_state
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.training import Clipping, Compare, GradientKey
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparison import Comparator, Comparison
from ddp_equivalence.comparison.gradients import describe
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.diagnosis.residual import fitted_mixture
from ddp_equivalence.measurement.example_lookup import ExampleLookup
from ddp_equivalence.measurement.measure import finished, least_precise, work_of
from ddp_equivalence.measurement.observation import heard
from ddp_equivalence.measurement.on_rank import ParameterNames, Races, RunOfStep, given_here
from ddp_equivalence.measurement.operation_log import autocast_entered
from ddp_equivalence.measurement.request import CheckOptions, check_batch, read_request
from ddp_equivalence.measurement.returned import DeclaredRows
from ddp_equivalence.measurement.whole_tensors import FlatParameters, WholeTensors
from ddp_equivalence.measurement.work import Work
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.simulated import (
    SimulatedCollective,
    SimulatedRankFailed,
    SimulatedWorld,
)
from ddp_equivalence.ranks.warm_ranks import on_ranks
from ddp_equivalence.reference import big_batch, in_dtype
from ddp_equivalence.strategies import STRATEGIES
from ddp_equivalence.strategies.catalogue import can_train
from ddp_equivalence.strategies.sharded_batch import sharded_batches
from ddp_equivalence.strategies.strategy import Strategy, Task

COPIES = 4
"""What a rank holds: its model, its gradients, DDP's buckets, and what is compared of them."""

MOST_OF_MEMORY = 0.8

SECONDS = 600.0
"""The deadline, unless another one is given."""

MOST_GROUPS = 8
"""Of the groups of ranks that hold different gradients, shares are fitted for so many."""

BLOCKS = 8
"""Into so many blocks of nodes the ranks are put where the nodes are too many to tell apart."""

ROUNDED = 0.05
"""No more of what a rank holds is taken for rounding, whatever the limit is."""

EXPLAINED = 1e-6
"""Shares are told if they leave less than this of what a rank holds."""


@dataclass(frozen=True)
class SimulatedShares:
    """``parts``: "ranks", "nodes", "local ranks" or "blocks of nodes". ``of``: for each part, how
    often its examples count; 1 is as often as in the big batch.
    """

    parts: str
    of: tuple[float, ...]


@dataclass(frozen=True)
class Held:
    """``ranks`` hold the same gradients: ``factor`` times those of the big batch, but for
    ``unexplained``, relative to what they hold. ``is_multiple``: that is nothing but rounding.
    """

    ranks: tuple[int, ...]
    factor: float
    unexplained: float
    is_multiple: bool
    shares: SimulatedShares | None = None


@dataclass(frozen=True)
class Simulation:
    """How simulated ranks compare with the big batch.

    ``outcome``: "same", "different" or "unknown". ``failure``: why it is unknown; "" if it is not.
    ``promised``: the cause by which a strategy's promise says that they differ here, None if it
    promises the big batch, or if the step is the user's own. ``held``: what the ranks hold, if they
    differ. ``reads``: for each example, how many ranks computed with it; None if this is not known.
    ``collectives``: how often each was issued by its ranks, in the step.
    """

    case: Case
    subject: str
    outcome: str
    failure: str = ""
    promised: str | None = None
    comparison: Comparison | None = None
    held: tuple[Held, ...] = ()
    reads: tuple[int, ...] | None = None
    collectives: Mapping[SimulatedCollective, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def keeps_promise(self) -> bool:
        """True if the outcome is what a strategy promises; "same" for a step of the user's own."""
        return self.outcome == ("same" if self.promised is None else "different")


def simulate(case: Case, step: Any, **options: Unpack[CheckOptions]) -> Simulation:
    """Compare what ``step`` leaves on simulated ranks with one big batch.

    ``case``: its layout may have up to 4,096 ranks, such as ``"128x8"``. ``step``, ``options``: as
    in ``check``; ``steps`` and options about processes are not taken.

    Raises BadCase if the case or an option cannot be right, or if there is too little memory for
    so many models.
    """
    started = time.monotonic()
    work = _work_of(case, step, options)
    deadline = options.get("deadline") or SECONDS
    try:
        # Torch keeps something of each mesh for the thread that made it, also when this has ended,
        # and another rank gets its number. So each simulation has a process of its own.
        (found,) = on_ranks("1x1", _simulated, work, backend="gloo", deadline=deadline, fresh=True)
    except RanksTimedOut:
        found = {"outcome": "unknown", "failure": f"the simulation took more than {deadline:g} s"}
    except RankFailed as error:
        found = {"outcome": "unknown", "failure": f"the process of all ranks failed: {error}"}
    return Simulation(case, name_of(step), seconds=time.monotonic() - started, **found)


# What is asked, checked before anything runs.


def _work_of(case: Case, step: Any, options: CheckOptions) -> Work:
    """Raises BadCase for what cannot be right."""
    strategy = STRATEGIES.get(step) if isinstance(step, str) else None
    if strategy is not None and (why := why_not_simulated(strategy)):
        raise BadCase("step", step, f"a strategy that can be simulated: {why}")
    if strategy is not None:
        options = _options_of(strategy, options)
    alone = case
    if isinstance(case, Case):
        # The options are checked as those of one rank: a process for each is not asked for.
        dealt = "equal" if strategy is not None and case.shards != OWN else OWN
        examples = case.catalogue_examples if case.batch is None else case.examples
        alone = replace(case, layout="1x1", shards=dealt, examples=examples)
    request = read_request(alone, step, options)
    check_batch(case, strategy, "")
    if request.steps != 1:
        raise BadCase("steps", request.steps, "1: simulated ranks take one step")
    if strategy is not None:
        _check_model(strategy, case)
    model = build_model(case)
    state = (*model.parameters(), *model.buffers())
    held = COPIES * sum(one.nbytes for one in state) * case.ranks.world_size
    room = MOST_OF_MEMORY * int(psutil.virtual_memory().available)
    if held > room:
        right = (
            f"fewer ranks, or a smaller model of the same layers: {case.ranks.world_size} copies "
            f"of this one take about {held / 2**30:.0f} GiB, and {room / 2**30:.0f} are free"
        )
        raise BadCase("layout", case.layout, right)
    return replace(work_of(request), case=case)


def _options_of(strategy: Strategy, options: CheckOptions) -> CheckOptions:
    """A strategy is compared by what its own trials compare."""
    compare: Compare = "update" if strategy.trains else "gradients"
    if (given := options.get("compare", compare)) != compare:
        raise BadCase("compare", given, f"{compare!r}: {strategy.name} is compared by it")
    return {**options, "compare": compare}


def _check_model(strategy: Strategy, case: Case) -> None:
    model, loss = case.model, case.loss
    if not (isinstance(model, str) and isinstance(loss, str)):
        return
    if not can_train(strategy, MODELS[model], LOSSES[loss]):
        right = f"a model that {strategy.name} can train with the loss {loss}"
        raise BadCase("model", model, right)


def why_not_simulated(strategy: Strategy) -> str:
    """Why simulated ranks cannot run the strategy; "" if they can."""
    if strategy.one_process:
        return f"{strategy.name} runs in one process, whatever the layout"
    if strategy.lane is not None or strategy.gpus_per_rank > 1:
        return f"{strategy.name} needs GPUs"
    if strategy.compiles:
        return f"{strategy.name} compiles code, which the ranks of one process would share"
    return ""


# Runs the ranks, in a process of its own.


@dataclass(frozen=True)
class _Left:
    """What one rank leaves. ``read``: the examples that it computed with; None if not known."""

    gradients: Mapping[GradientKey, Tensor | None]
    read: frozenset[int] | None


def _simulated(_: Rank, work: Work) -> dict[str, Any]:
    """Run all ranks and compare what they leave. Returns fields of a Simulation."""
    case, step = work.case, work.step
    found: dict[str, Any] = {"outcome": "unknown"}
    if isinstance(step, str):
        (sharded_batch,) = sharded_batches(case)
        found["promised"] = STRATEGIES[step].cause_of_difference(sharded_batch)
    world = SimulatedWorld[_Left](case.ranks)
    with without_restoring_random_state():
        expected = Expected(big_batch(case, work.compare, work.training))
        try:
            with autocast_entered() as autocast:
                left = _Ranks(work).left_in(world)
        except SimulatedRankFailed as error:
            return found | {"failure": _in_words(error)}
        comparison = _compared(expected, left, least_precise(dtype for _, dtype in autocast))
        held = () if comparison.same else _held(work, expected, comparison, left)
    return found | {
        "outcome": "same" if comparison.same else "different",
        "comparison": comparison,
        "held": held,
        "reads": _reads(left, expected.reference.examples[0]),
        "collectives": dict(world.collectives),
    }


class _Ranks:
    """Runs the step on all ranks of a world. What watches a process is shared by its ranks."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._whole, self._sizes = build_whole_batch(work.case)
        self._shards = [
            split(work.case.shards, size, work.case.ranks.world_size) for size in self._sizes
        ]
        self._flat, self._clipping = FlatParameters(), _ClippingByRank()

    def left_in(self, world: SimulatedWorld[_Left]) -> list[_Left]:
        """What each rank leaves. Raises SimulatedRankFailed."""
        with self._flat.recorded(), self._clipping.watched():
            return world.run(self._live)

    def _live(self, rank: Rank) -> _Left:
        work, case = self._work, self._work.case
        model = build_model(case)
        names = ParameterNames(model)
        given = given_here(rank, work, self._whole, self._sizes)
        at = self._shards[0].indices[rank.rank]
        rows = _RowsRead(ExampleLookup(self._whole, [(given[0], at)], case.batch_dims))
        run = RunOfStep(
            rank=rank,
            work=work,
            model=model,
            held=WholeTensors(model, names, self._flat),
            races=Races(rank.device),
            planted=None,
            declared=DeclaredRows([at]),
            observer=None,
            clipping=self._clipping.of_this_rank,
        )
        with heard(model, rows.hear):
            task = Task(case, model, rank, self._shards, lr=work.training.lr)
            gradients = run.train(task, given)
        return _Left(gradients, rows.examples if rows.examples or at else frozenset())


class _RowsRead:
    """``examples``: those with which the model was called; None if some are not known."""

    def __init__(self, lookup: ExampleLookup) -> None:
        self._lookup = lookup
        self.examples: frozenset[int] | None = None
        self._is_known = True

    def hear(self, arguments: object) -> None:
        """The model is called with these arguments."""
        if not torch.is_grad_enabled():
            return
        rows = self._lookup.rows_of(arguments)
        self._is_known &= rows is not None and rows.is_certain
        read = frozenset() if rows is None else frozenset(rows.if_certain)
        self.examples = (self.examples or frozenset()) | read if self._is_known else None


class _ClippingByRank(Clipping):
    """Torch's functions are watched once, and what they clip is kept for the rank that calls."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    def of_this_rank(self) -> Clipping:
        """What hears the calls of this thread from now on."""
        clipping = self._here.clipping = _WatchedElsewhere()
        return clipping

    def _clip(self, clip: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        here: Clipping | None = getattr(self._here, "clipping", None)
        if here is None:  # a strategy clips, or a trainer, whose gradients are not kept
            return clip(*arguments, **named)
        return here._clip(clip, *arguments, **named)


class _WatchedElsewhere(Clipping):
    @contextmanager
    def watched(self) -> Iterator[None]:
        yield


def _in_words(error: SimulatedRankFailed) -> str:
    if error.rank is None:
        return str(error)
    return f"rank {error.rank} raised {error}\n{error.stack}"


# Compares what the ranks left, and says what it is where it is not the big batch.


def _compared(
    expected: Expected, left: Sequence[_Left], autocast: torch.dtype | None
) -> Comparison:
    """``autocast``: the least precise dtype of the autocast regions that the ranks entered."""
    reference = expected.reference
    tolerance = Tolerance(reference.lowest_dtype, exact=reference.case.exact)
    comparator = Comparator(reference.expected, expected.described, tolerance)
    for rank, one in enumerate(left):
        comparator.begin(rank, describe(one.gradients))
        for chunk in chunks(one.gradients):
            comparator.add(rank, chunk)
    return finished(
        comparator, expected, tolerance, None if tolerance.dtype is torch.float64 else autocast
    )


def _reads(left: Sequence[_Left], examples: int) -> tuple[int, ...] | None:
    counts = [0] * examples
    for one in left:
        if one.read is None:
            return None
        for index in one.read:
            counts[index] += 1
    return tuple(counts)


def _held(
    work: Work, expected: Expected, comparison: Comparison, left: Sequence[_Left]
) -> tuple[Held, ...]:
    """The groups of ranks that hold the same, and what they hold."""
    groups: dict[str, list[int]] = {}
    for rank, digest in comparison.digests.items():
        groups.setdefault(digest, []).append(rank)
    keys = [
        key
        for key, right in expected.reference.expected.items()
        if right is not None
        and all((one.gradients.get(key) is not None) for one in left)
        and all(one.gradients[key].shape == right.shape for one in left)  # type: ignore[union-attr]
    ]
    if not keys:
        return ()
    right = _flat(expected.reference.expected, keys)
    shares: dict[int, SimulatedShares] = {}
    if work.compare == "gradients":
        some = [ranks[0] for ranks in groups.values()][:MOST_GROUPS]
        measured = {rank: _flat(left[rank].gradients, keys) for rank in some}
        with suppress(Exception):  # a loss of the user's need not take a part of the batch
            shares = _shares(work.case, left, keys, right, measured)
    most = max(one.limit.relative for one in comparison.parameters if one.key in keys)
    return tuple(
        _held_by(ranks, right, _flat(left[ranks[0]].gradients, keys), min(most, ROUNDED), shares)
        for ranks in groups.values()
    )


def _held_by(
    ranks: Sequence[int],
    right: Tensor,
    one: Tensor,
    most: float,
    shares: Mapping[int, SimulatedShares],
) -> Held:
    """``most``: so much of it may be rounding."""
    square, norm = float(right @ right), float(one.norm())
    factor = float(one @ right) / square if square else math.nan
    unexplained = float((one - factor * right).norm()) / norm if norm else 0.0
    return Held(tuple(ranks), factor, unexplained, unexplained <= most, shares.get(ranks[0]))


def _flat(gradients: Mapping[GradientKey, Tensor | None], keys: Sequence[GradientKey]) -> Tensor:
    found = [gradients[key] for key in keys]
    return torch.cat([one.to_dense().double().reshape(-1) for one in found if one is not None])


def _shares(
    case: Case,
    left: Sequence[_Left],
    keys: Sequence[GradientKey],
    right: Tensor,
    measured: Mapping[int, Tensor],
) -> dict[int, SimulatedShares]:
    """Rank -> how often the examples of each part count in what it holds, in the finest parts that
    can be told apart; empty if none explain it. The loss of a part is that of its examples alone.
    """
    batch, (size,) = build_whole_batch(case)
    batch = in_dtype(batch, torch.float64)
    if case.shards == OWN:
        by_rank = [one.read or frozenset() for one in left]
    else:
        by_rank = [frozenset(one) for one in split(case.shards, size, len(left)).indices]
    mixtures = torch.stack([right, *measured.values()])
    for name, ranks_of_parts in _parts(case.ranks):
        parts = [frozenset().union(*(by_rank[rank] for rank in ranks)) for ranks in ranks_of_parts]
        if not all(parts) or len(parts) >= right.numel():
            continue
        pieces = torch.stack([_gradient_of(case, batch, sorted(part), keys) for part in parts])
        weights = fitted_mixture(pieces, mixtures).weights
        if weights is None or bool((weights[0].abs() < EXPLAINED).any()):
            continue
        missed = (mixtures - weights @ pieces).norm(dim=1) / mixtures.norm(dim=1).clamp(min=1e-300)
        if bool((missed < EXPLAINED).all()):
            return {
                rank: SimulatedShares(name, tuple((row / weights[0]).tolist()))
                for rank, row in zip(measured, weights[1:], strict=True)
            }
    return {}


def _parts(layout: Layout) -> Iterable[tuple[str, list[list[int]]]]:
    """The ranks, put together in ever coarser parts."""
    nodes = [list(layout.ranks_on(node)) for node in range(layout.nodes)]
    yield "ranks", [[rank] for rank in range(layout.world_size)]
    yield "nodes", nodes
    if layout.has_even_nodes:
        yield "local ranks", [list(ranks) for ranks in zip(*nodes, strict=True)]
    each = -(-len(nodes) // BLOCKS)
    blocks = [nodes[start : start + each] for start in range(0, len(nodes), each)]
    yield "blocks of nodes", [[rank for node in block for rank in node] for block in blocks]


def _gradient_of(
    case: Case, batch: Any, examples: Sequence[int], keys: Sequence[GradientKey]
) -> Tensor:
    """The gradient of the loss of these examples of the batch alone."""
    model = build_model(case).double()
    loss_of(case)(model, take(batch, examples, case.batch_dims)).backward()
    by_name = dict(model.named_parameters())
    own = [by_name[name] for _, name in keys]
    return _flat(
        {
            key: torch.zeros_like(one) if one.grad is None else one.grad
            for key, one in zip(keys, own, strict=True)
        },
        keys,
    )
