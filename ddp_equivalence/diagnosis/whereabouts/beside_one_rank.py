"""Compares a step with the same step on one rank, where a difference has no known cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain

import torch

from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.beside_the_loss import Unlike, unlike_the_loss
from ddp_equivalence.diagnosis.whereabouts.deaf_methods import deaf_methods
from ddp_equivalence.diagnosis.whereabouts.kinship import Deal
from ddp_equivalence.diagnosis.whereabouts.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.whereabouts.parting import Parting, partings
from ddp_equivalence.diagnosis.whereabouts.past_autograd import past_autograd
from ddp_equivalence.diagnosis.whereabouts.scaled_loss import (
    Scaling,
    is_left_by_backward,
    loss_on_one_rank,
    scalings_of_loss,
)
from ddp_equivalence.diagnosis.whereabouts.selections import found_in
from ddp_equivalence.diagnosis.whereabouts.two_logs import TwoLogs
from ddp_equivalence.measurement.observation import Indices
from ddp_equivalence.measurement.one_rank import (
    OneRank,
    operations_beside_one_rank,
    operations_on_one_rank,
)
from ddp_equivalence.measurement.operations import DeafBackward, Operation, Operations
from ddp_equivalence.measurement.request import Request

COARSEST = 1e-4
"""In a precision with a larger eps, rounding alone makes other values."""

MOST_SECONDS = 10.0
"""The seconds that the step gets on one rank, and again on its own ranks."""


@dataclass(frozen=True)
class BesideOneRank:
    """``is_right_alone``: the step leaves the gradients of the big batch on one rank.

    ``factor_alone``: it leaves them times this number there; None if it leaves others.
    ``partings``: where the ranks part from one rank that is right. ``unlike_loss``: where one rank
    that is wrong leaves the loss of the case. ``past_autograd``: the collectives on the way to
    wrong gradients of which autograd knows nothing. ``scalings``: the numbers by which the loss was
    scaled on one rank that is wrong. ``deaf``: the backward methods of the user's own that do not
    use the gradient that they are given. ``loss_alone``: at which backward began on one rank that
    is wrong; None if it is not known. ``is_left_by_backward``: what that leaves is what backward
    has computed.
    """

    is_right_alone: bool
    factor_alone: float | None = None
    partings: tuple[Parting, ...] = ()
    unlike_loss: tuple[Unlike, ...] = ()
    past_autograd: tuple[Operation, ...] = ()
    scalings: tuple[Scaling, ...] = ()
    deaf: tuple[DeafBackward, ...] = ()
    loss_alone: float | None = None
    is_left_by_backward: bool = False


def beside_one_rank(view: View, request: Request) -> BesideOneRank | None:
    """Run the step on one rank as well; None if this shows nothing."""
    return unless_it_fails(lambda: _beside_one_rank(view, request), lambda why: None)


def _beside_one_rank(view: View, request: Request) -> BesideOneRank | None:
    if not _can_be_asked(view, request):
        return None
    rows = _rows(view)
    order = _order(view, rows)
    deadline = min(request.deadline, MOST_SECONDS)
    runs = operations_beside_one_rank(request, deadline, order or ())
    if runs is None or torch.finfo(view.setting.dtype).eps > COARSEST:
        return None
    factor = _factor(view, runs.alone)
    if factor is None or abs(factor - 1) > _tolerance(view, runs.alone):
        # With other random numbers it may be right all the same.
        draws = any(one.draws for one in runs.alone.operations)
        if draws:
            return None
        unlike = unlike_the_loss(view, runs.alone, _parts(view, rows))
        return replace(_wrong_alone(runs, factor), unlike_loss=unlike)
    if view.world_size == 1:
        return None  # the step has left something else this time
    deaf = deaf_methods(runs, is_right_alone=True)
    if rows is None and order is not None and _takes_parts(view):
        rows = [tuple(range(view.setting.example_count))] * view.world_size
    if rows is None or order is None:
        return BesideOneRank(is_right_alone=True, factor_alone=1.0, deaf=deaf)
    place = {example: number for number, example in enumerate(order)}
    deal = Deal(
        tuple(tuple(place.get(one, one) for one in of_rank) for of_rank in rows),
        view.setting.example_count,
        torch.finfo(_least_precise(view, runs.alone)).eps,
        float(view.expected.abs().max()),
    )
    logs = logs_of(runs, deal)
    return BesideOneRank(True, 1.0, partings(logs), past_autograd=past_autograd(logs), deaf=deaf)


def _wrong_alone(runs: OneRank, factor: float | None) -> BesideOneRank:
    return BesideOneRank(
        is_right_alone=False,
        factor_alone=factor,
        scalings=tuple(scalings_of_loss(runs.alone)),
        deaf=deaf_methods(runs, is_right_alone=False),
        loss_alone=loss_on_one_rank(runs.alone),
        is_left_by_backward=is_left_by_backward(runs.alone),
    )


def logs_of(runs: OneRank, deal: Deal) -> TwoLogs:
    """The logs of both runs, with the parts that the ranks were seen to take of anything."""
    logs = TwoLogs(runs, deal)
    found = found_in(logs.values(), deal.selections)
    if not found:
        return logs
    logs = TwoLogs(runs, replace(deal, others=tuple(found)))
    rivals = logs.rivals()
    if not rivals:
        return logs
    others = tuple(one for one in found if one not in rivals)
    return TwoLogs(runs, replace(deal, others=others), rivals)


def _takes_parts(view: View) -> bool:
    """True if each rank was given the whole batch, and it was not recognised what it reads."""
    return view.setting.shards is None and view.observed.examples_read is None


def asking_one_rank(view: View, request: Request) -> View:
    """The view, which runs the step on one rank if a cause asks for what it leaves there."""
    return replace(view, factor_on_one_rank=cache(lambda: _factor_on_one_rank(view, request)))


def _factor_on_one_rank(view: View, request: Request) -> float | None:
    if not _can_be_asked(view, request) or torch.finfo(view.setting.dtype).eps > COARSEST:
        return None
    rows = _rows(view)
    order = () if rows is None else _order(view, rows)
    alone = operations_on_one_rank(request, min(request.deadline, MOST_SECONDS), order or ())
    return None if alone is None else _factor(view, alone)


def _can_be_asked(view: View, request: Request) -> bool:
    """True for one step of a user that was watched."""
    return request.strategy is None and request.step_count == 1 and bool(view.observed.by_rank)


def _rows(view: View) -> list[tuple[int, ...]] | None:
    """For each rank, the examples that it reads, in their order; None if they are not known."""
    if view.setting.shards is not None:
        return list(view.setting.shards)
    read = view.observed.examples_read
    if read is None:
        return None
    rows = [tuple(chain.from_iterable(parts)) for parts in read]
    times = Counter(chain.from_iterable(rows))
    is_equal = len({*times.values()}) == 1 and len(times) == view.setting.example_count
    return rows if is_equal else None


def _order(view: View, rows: Sequence[tuple[int, ...]] | None) -> tuple[int, ...] | None:
    """The order of the batch in which the micro-batches of one rank are those of all ranks joined.

    () if there is only one micro-batch; None if there is no such order.
    """
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    if len(counts) != 1:
        return None
    count = max(counts.pop(), 1)
    if count == 1:
        return ()
    if rows is None:
        return None
    examples = sorted(chain.from_iterable(rows))
    if examples != list(range(view.setting.example_count)) or any(len(one) % count for one in rows):
        return None
    sizes = [len(one) // count for one in rows]
    return tuple(
        example
        for number in range(count)
        for one, size in zip(rows, sizes, strict=True)
        for example in one[number * size : (number + 1) * size]
    )


def _parts(view: View, rows: Sequence[tuple[int, ...]] | None) -> list[Indices]:
    """The examples of each backward pass of one rank, if it has several and they are known."""
    read = view.observed.examples_read
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    if rows is None or read is None or len(counts) != 1 or {len(one) for one in read} != counts:
        return []
    if counts <= {0, 1}:
        return []
    return [tuple(chain.from_iterable(each)) for each in zip(*read, strict=True)]


def _factor(view: View, alone: Operations) -> float | None:
    """One rank holds so many times the gradient of the big batch; None if it holds another one."""
    sample = view.parameters.sample
    if any(name not in alone.left for name in sample.sizes):
        return None
    values = {name: alone.values[alone.left[name]].tensor for name in sample.sizes}
    if any(values[name].numel() != size for name, size in sample.sizes.items()):
        return None
    held, norm = sample.of(values), float(view.expected.norm())
    factor = float(held @ view.expected) / norm**2 if norm else 1.0
    return factor if unexplained(held, factor * view.expected) < _tolerance(view, alone) else None


def _tolerance(view: View, alone: Operations) -> float:
    return max(NEGLIGIBLE, 100 * torch.finfo(_least_precise(view, alone)).eps)


def _least_precise(view: View, alone: Operations) -> torch.dtype:
    dtypes = {value.dtype for value in alone.values if value.is_floating_point}
    found: list[torch.dtype] = [getattr(torch, name) for name in dtypes]
    return max([view.setting.dtype, *found], key=lambda dtype: torch.finfo(dtype).eps)
