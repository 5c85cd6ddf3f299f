"""Chooses the lane on which a case runs, or says why this machine cannot run it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.models import MODELS
from ddp_equivalence.ranks.lanes import CannotRunHere, Lane, choose, missing
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
        may_fall_back="nccl" not in must_run,
    )


def _lane_of_one_process(case: Case, strategy: Strategy) -> Lane:
    """The lane of a strategy whose single process drives all replicas.

    The process needs no backend, but perhaps several devices.
    """
    if case.ranks.nodes > 1:
        right = (
            f"one node, such as '1x{case.ranks.world_size}': {strategy.name} runs in one process"
        )
        raise BadCase("layout", case.layout, right)
    if strategy.lane is None:
        return Lane("emulated", "gloo", "cpu", "one process on the CPU")
    reason = missing(strategy.lane, case.ranks.world_size)
    if reason is not None:
        right = f"{strategy.name} {reason}"
        raise CannotRunHere("layout", case.layout, right, strategy.lane, case.layout, reason)
    return Lane(strategy.lane, "gloo", "cuda")


def _lane_of_several_gpus(case: Case, strategy: Strategy) -> Lane:
    """The lane of a strategy whose ranks drive several GPUs each. It runs on no other."""
    name, each = str(strategy.lane), strategy.gpus_per_rank
    reason = missing(name, case.ranks.world_size, each)
    if reason is not None:
        right = f"{strategy.name} {reason}"
        raise CannotRunHere("layout", case.layout, right, name, case.layout, reason)
    return Lane(name, name, "cuda", gpus_per_rank=each)


@contextmanager
def subject_named(step: object) -> Iterator[None]:
    """Tell a CannotRunHere that leaves the block which step was to run."""
    try:
        yield
    except CannotRunHere as error:
        error.subject = name_of(step)
        raise
