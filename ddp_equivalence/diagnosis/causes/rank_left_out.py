"""The gradients of some ranks are missing from those of all other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Prediction, ranks_by_number
from ddp_equivalence.diagnosis.lines.of_gradients import (
    fix_of_left_out,
    lines_of_left_out,
    ranks_without_gradient,
)
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

NO_WEIGHT = 1e-3
"""A rank is tried as left out if its weight, relative to the largest, is smaller than this."""


def predict(view: View) -> Sequence[Prediction]:
    """The gradients without the ranks that may be left out, unless these are a whole node."""
    nodes = view.setting.ranks_by_node
    whole_nodes = [ranks for ranks in nodes if len(ranks) > 1 and len(nodes) > 1]
    left_out = [ranks for ranks in ranks_that_may_be_left_out(view) if ranks not in whole_nodes]
    return tuple(one for ranks in left_out for one in predictions_without(view, ranks))


def ranks_that_may_be_left_out(view: View) -> list[tuple[int, ...]]:
    """The sets of ranks that have no weight in what some rank holds.

    If the weights cannot be determined, each single rank.
    """
    if view.world_size == 1:
        return []
    if view.weights_of_ranks is None:
        return [(rank,) for rank in range(view.world_size)]
    candidates = []
    for weights in view.weights_of_ranks.abs():
        without_weight = torch.nonzero(weights < NO_WEIGHT * weights.max()).flatten().tolist()
        if 0 < len(without_weight) < view.world_size:
            candidates.append(tuple(without_weight))
    return list(dict.fromkeys(candidates))


def predictions_without(view: View, left_out: tuple[int, ...]) -> Iterator[Prediction]:
    """The mean or the sum of the other ranks' gradients, for every candidate for the gradients."""
    for local in view.local_gradients:
        # If the gradients of these ranks are zero, leaving them out changes nothing.
        if bool(local[list(left_out)].any()):
            yield from _predictions_without(view, left_out, local)


def _predictions_without(
    view: View, left_out: tuple[int, ...], local: Tensor
) -> Iterator[Prediction]:
    """``local``: every rank's local gradient, shape (world size, elements)."""
    others = [rank for rank in range(view.world_size) if rank not in left_out]
    if nearly_equal(local[others].mean(0), local.mean(0)):
        return  # without these ranks there is only another factor, which has other reasons
    names = ranks_by_number(left_out)
    divisors: dict[int, str] = {
        view.world_size: f"{names} left out, but counted in the divisor {view.world_size}",
        len(others): f"{names} left out, and not counted in the divisor {len(others)}",
    }
    if view.parts.add_up_to_the_big_batch:
        divisors[1] = f"{names} left out"
    for divisor, detail in divisors.items():
        held = local[others].sum(0) / divisor
        yield Prediction(view.on_every_rank(held), detail)
        # If only one rank is not left out, all hold their own gradients, which is another cause.
        if view.setting.every_rank_reports and len(others) > 1:
            by_rank = held.expand(view.world_size, -1).clone()
            by_rank[list(left_out)] = local[list(left_out)]
            own = "holds its own gradient" if len(left_out) == 1 else "hold their own gradients"
            yield Prediction(by_rank, f"{detail}; {names} {own}")


def lines(view: View) -> Sequence[PointedLine]:
    """Where these ranks' gradients are lost."""
    return lines_of_left_out(view, ranks_without_weight(view))


def fix(view: View) -> str:
    """Reduce the gradients of all ranks."""
    return fix_of_left_out(view, ranks_without_weight(view))


def ranks_without_weight(view: View) -> tuple[int, ...]:
    """The ranks whose gradients are missing; () if that is not known."""
    sets = ranks_that_may_be_left_out(view) if view.weights_of_ranks is not None else []
    return sets[0] if sets else ranks_without_gradient(view)


HYPOTHESIS = Hypothesis(
    name="rank_left_out",
    sentence="The gradient that a rank computed is missing from the gradients of all other ranks.",
    look_at="the process group that gradients are reduced in, and early returns before all_reduce",
    predict=predict,
    tell_apart="Use more than one rank on every node.",
    headline="a rank's gradient is missing everywhere else",
    lines=lines,
    fix=fix,
)
