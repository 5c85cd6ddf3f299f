"""Chooses the lane on which a case runs, or says why this machine cannot run it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.ranks.backend_names import NCCL_SHARED
from ddp_equivalence.ranks.lanes import (
    CannotRunHere,
    Lane,
    choose,
    missing,
    must_share,
    replicas_lane,
    shared_lane,
)
from ddp_equivalence.strategies.strategy import Strategy


def lane_of(case: Case, strategy: Strategy | None, backend: str, must_run: Sequence[str]) -> Lane:
    """The lane on which a case runs; ``strategy`` is None for a step of the user.

    ``must_run``: the lanes that ``--must-run`` requires. Raises CannotRunHere if this machine
    cannot run the case on the lane that is asked for.
    """
    if strategy is not None and strategy.one_process:
        return _lane_of_one_process(case, strategy)
    if strategy is not None and strategy.gpus_per_rank > 1:
        return _lane_of_several_gpus(case, strategy)
    model = MODELS.get(case.model) if isinstance(case.model, str) else None
    return choose(
        case.ranks,
        backend,
        sparse_gradients=model is not None and model.sparse_gradients,
        may_fall_back="nccl" not in must_run and NCCL_SHARED not in must_run,
    )


def _lane_of_one_process(case: Case, strategy: Strategy) -> Lane:
    """The lane of a strategy whose single process drives all replicas.

    The process needs no backend, but perhaps several devices, or one for several replicas.
    """
    if case.ranks.nodes > 1:
        right = (
            f"one node, such as '1x{case.ranks.world_size}': {strategy.name} runs in one process"
        )
        raise BadCase("layout", case.layout, right)
    if strategy.lane is None:
        return Lane("emulated", "gloo", "cpu", "one process on the CPU")
    lane = replicas_lane(case.ranks.world_size)
    _require(lane.name, case, strategy)
    return lane


def _lane_of_several_gpus(case: Case, strategy: Strategy) -> Lane:
    """The lane of a strategy whose ranks drive several GPUs each, or else one several times."""
    each = strategy.gpus_per_rank
    if must_share(case.ranks.world_size * each):
        _require(NCCL_SHARED, case, strategy)
        return shared_lane(case.ranks, f", with {each} replicas on one device each")
    _require("nccl", case, strategy)
    return Lane("nccl", "nccl", "cuda", gpus_per_rank=each)


def _require(lane: str, case: Case, strategy: Strategy) -> None:
    """Raises CannotRunHere if this machine lacks the lane for the case."""
    reason = missing(lane, case.ranks.world_size, strategy.gpus_per_rank)
    if reason is not None:
        right = f"{strategy.name} {reason}"
        raise CannotRunHere("layout", case.layout, right, lane, case.layout, reason)


@contextmanager
def subject_named(step: object) -> Iterator[None]:
    """Tell a CannotRunHere that leaves the block which step was to run."""
    try:
        yield
    except CannotRunHere as error:
        error.subject = name_of(step)
        raise
