"""``simulate`` compares a step with the big batch on simulated ranks: its rule at a thousand ranks.

All ranks are threads of one process, see ``ddp_equivalence.ranks.simulated``. That shows who gets
which examples, what is divided by what, and which groups reduce. It shows nothing of a backend.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import psutil
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import dim_of, take
from ddp_equivalence.case.batch_tree import leaves_of, map_tensors
from ddp_equivalence.case.build import build_model, build_whole_batch, given_to, loss_of
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.case.losses import LOSSES
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.case.random_state import (
    Seeds,
    seeded,
    step_seed,
    without_restoring_random_state,
)
from ddp_equivalence.case.shards import OWN, split
from ddp_equivalence.case.training import Clipping, Compare, GradientKey, Training
from ddp_equivalence.comparison.chunks import chunks
from ddp_equivalence.comparison.comparison import Comparator, Comparison
from ddp_equivalence.comparison.gradients import describe, in_first_step
from ddp_equivalence.comparison.rounding import Expected
from ddp_equivalence.comparison.tolerance import Tolerance
from ddp_equivalence.diagnosis.residual import fitted_mixture
from ddp_equivalence.measurement.measure import finished
from ddp_equivalence.measurement.on_rank import ParameterNames
from ddp_equivalence.measurement.operation_log import autocast_entered
from ddp_equivalence.measurement.request import CheckOptions, check_batch, read_request
from ddp_equivalence.measurement.returned import tensors_by_name
from ddp_equivalence.measurement.whole_tensors import FlatParameters, WholeTensors
from ddp_equivalence.measurement.work import is_prepared
from ddp_equivalence.ranks.failure import RankFailed, RanksTimedOut
from ddp_equivalence.ranks.process_state import as_a_script_has_them
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


@dataclass(frozen=True)
class _Work:
    """The case and the step, and how they are compared, as they travel to the process."""

    case: Case
    step: Any
    compare: Compare
    training: Training
    seeds: Seeds


def _work_of(case: Case, step: Any, options: CheckOptions) -> _Work:
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
    held = COPIES * sum(one.nbytes for one in model.parameters()) * case.ranks.world_size
    room = MOST_OF_MEMORY * int(psutil.virtual_memory().available)
    if held > room:
        right = (
            f"fewer ranks, or a smaller model of the same layers: {case.ranks.world_size} copies "
            f"of this one take about {held / 2**30:.0f} GiB, and {room / 2**30:.0f} are free"
        )
        raise BadCase("layout", case.layout, right)
    return _Work(case, step, request.compare, request.training, request.seeds)


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


def _simulated(_: Rank, work: _Work) -> dict[str, Any]:
    """Run all ranks and compare what they leave. Returns fields of a Simulation."""
    case, step = work.case, work.step
    found: dict[str, Any] = {"outcome": "unknown"}
    if isinstance(step, str):
        (sharded_batch,) = sharded_batches(case)
        found["promised"] = STRATEGIES[step].cause_of_difference(sharded_batch)
    world = SimulatedWorld[_Left](case.ranks)
    with without_restoring_random_state():
        expected = Expected(big_batch(case, work.compare, work.training))
        ranks = _Ranks(work, world)
        try:
            left = ranks.run()
        except SimulatedRankFailed as error:
            return found | {"failure": _in_words(error)}
        comparison = _compared(expected, left, ranks.autocast)
        held = () if comparison.same else _held(work, expected, comparison, left)
    return found | {
        "outcome": "same" if comparison.same else "different",
        "comparison": comparison,
        "held": held,
        "reads": _reads(left, expected.reference.examples[0]),
        "collectives": dict(world.collectives),
    }


class _Ranks:
    """Runs the step on all ranks of a world. What watches a process is shared by its ranks.

    ``autocast``: the least precise dtype of the autocast regions that they entered.
    """

    def __init__(self, work: _Work, world: SimulatedWorld[_Left]) -> None:
        self._work, self._world = work, world
        self._whole, self._sizes = build_whole_batch(work.case)
        shards = [split(work.case.shards, size, work.case.ranks.world_size) for size in self._sizes]
        self._shards = shards
        self._rows = _Rows(self._whole, work.case)
        self._flat, self._clipping = FlatParameters(), _ClippingByRank()
        self.autocast: torch.dtype | None = None

    def run(self) -> list[_Left]:
        """Raises SimulatedRankFailed."""
        with self._flat.recorded(), self._clipping.watched(), autocast_entered() as autocast:
            left = self._world.run(self._live)
        self.autocast = max(
            (dtype for _, dtype in autocast), key=lambda one: torch.finfo(one).eps, default=None
        )
        return left

    def _live(self, rank: Rank) -> _Left:
        work, case = self._work, self._work.case
        model = build_model(case)
        names = ParameterNames(model)
        held = WholeTensors(model, names, self._flat)
        before = held.weights() if work.compare == "update" else {}
        (given,) = given_to(
            rank.rank, case, self._whole, self._sizes, undivided=False, together=False
        )
        given = map_tensors(_copy, given)  # a step may write to its batch
        read = self._rows.read_by(model, is_given=bool(self._shards[0].indices[rank.rank]))
        task = Task(case, model, rank, self._shards, lr=work.training.lr)
        with as_a_script_has_them(rank):
            returned = self._step(task)(given)
        self._world.stop_counting()
        left = self._left(held, before, returned)
        return _Left(in_first_step(left), read())

    def _step(self, task: Task) -> Callable[[Any], Any]:
        step, rank = self._work.step, task.rank
        if isinstance(step, str):
            prepared = STRATEGIES[step].prepare(task)
        elif is_prepared(step):
            with seeded(step_seed(self._work.case, 0, rank.rank, self._work.seeds)):
                prepared = step(task.model, rank)
        else:
            prepared = partial(_called, step, task.model, rank)
        seed = step_seed(self._work.case, 0, rank.rank, self._work.seeds)

        def run(given: Any) -> Any:
            with seeded(seed):
                return prepared(given)

        return run

    def _left(
        self, held: WholeTensors, before: Mapping[str, Tensor], returned: Any
    ) -> dict[str, Tensor | None]:
        """The gradients or updates, copied: the rank's memory is freed when it has ended."""
        if self._work.compare == "update":
            if returned is None:
                return _copied(held.updates(before))
            return _copied(held.updates_to(held.returned(tensors_by_name(returned)), before))
        clipping = self._clipping.of_this_rank
        if returned is not None:
            tensors = tensors_by_name(returned)
        else:
            tensors = {name: one.grad for name, one in held.parameters().items()}
        kept = clipping.before(tensors.values())
        if returned is None and not kept:
            return _copied(held.gradients())
        tensors = {name: kept.get(id(one), one) for name, one in tensors.items()}
        return _copied(held.returned(tensors) if returned is not None else held.whole(tensors, {}))


def _called(step: Any, model: nn.Module, rank: Rank, given: Any) -> Any:
    return step(model, given, rank)


def _copied(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if one is None else one.detach().clone() for name, one in tensors.items()}


class _ClippingByRank(Clipping):
    """Torch's functions are watched once, and what they clip is kept for the rank that calls."""

    def __init__(self) -> None:
        super().__init__()
        self._here = threading.local()

    @property
    def of_this_rank(self) -> Clipping:
        if not hasattr(self._here, "clipping"):
            self._here.clipping = Clipping()
        clipping: Clipping = self._here.clipping
        return clipping

    def _clip(self, *arguments: Any, **named: Any) -> Any:
        return self.of_this_rank._clip(*arguments, **named)


class _Rows:
    """Finds the examples of a batch again by the values of their rows, in what a model is given.
    Rows that several examples share tell nothing; with an example that has no others, nothing is
    known.
    """

    def __init__(self, whole: Any, case: Case) -> None:
        at: dict[bytes, list[int]] = {}
        for path, leaf in leaves_of(whole):
            if isinstance(leaf, Tensor) and leaf.dim() and dim_of(path, leaf, case.batch_dims) == 0:
                for index, key in enumerate(_keys(leaf)):
                    at.setdefault(key, []).append(index)
        self._at = {key: indices[0] for key, indices in at.items() if len(indices) == 1}
        every = {index for indices in at.values() for index in indices}
        self._all_are_known = every <= set(self._at.values())

    def read_by(self, model: nn.Module, is_given: bool) -> Callable[[], frozenset[int] | None]:
        """Listen to the model from now on. The result returns what it has been given since; None
        if that is not known. ``is_given``: the rank has examples.
        """
        found: set[int] = set()

        def hear(_: nn.Module, arguments: Any, named: Any) -> None:
            if torch.is_grad_enabled():
                for one in pytree.tree_leaves((arguments, named)):
                    if isinstance(one, Tensor) and one.dim():
                        found.update(self._at[key] for key in _keys(one) if key in self._at)

        model.register_forward_pre_hook(hear, with_kwargs=True)
        return lambda: frozenset(found) if self._all_are_known and (found or not is_given) else None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _keys(leaf: Tensor) -> list[bytes]:
    if not leaf.numel():
        return []
    with torch.no_grad():
        rows = leaf.detach().contiguous().reshape(leaf.shape[0], -1)
        kind = f"{leaf.dtype}{tuple(leaf.shape[1:])}".encode()
        return [kind + row.view(torch.uint8).numpy().tobytes() for row in rows]


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
    work: _Work, expected: Expected, comparison: Comparison, left: Sequence[_Left]
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
    if case.shards == OWN:
        by_rank = [one.read or frozenset() for one in left]
    else:
        (size,) = build_whole_batch(case)[1]
        by_rank = [frozenset(one) for one in split(case.shards, size, len(left)).indices]
    mixtures = torch.stack([right, *measured.values()])
    for name, ranks_of_parts in _parts(case.ranks):
        parts = [frozenset().union(*(by_rank[rank] for rank in ranks)) for ranks in ranks_of_parts]
        if not all(parts) or len(parts) >= right.numel():
            continue
        pieces = torch.stack([_gradient_of(case, sorted(part), keys) for part in parts])
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


def _gradient_of(case: Case, examples: Sequence[int], keys: Sequence[GradientKey]) -> Tensor:
    """The gradient of the loss of these examples alone."""
    model = build_model(case).double()
    whole = in_dtype(build_whole_batch(case)[0], torch.float64)
    loss_of(case)(model, take(whole, examples, case.batch_dims)).backward()
    by_name = dict(model.named_parameters())
    return _flat(
        {
            key: torch.zeros_like(by_name[key[1]]) if (one := by_name[key[1]].grad) is None else one
            for key in keys
        },
        keys,
    )
