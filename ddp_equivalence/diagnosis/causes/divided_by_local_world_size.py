"""Summed over all ranks, divided by the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.layout.nodes == 1:
        return ()
    return tuple(way for own in view.owns for way in _divided(view, own.sum(0)))


def _divided(view: View, total: Tensor) -> Sequence[Way]:
    local = torch.tensor([row.local_world_size for row in view.layout.rows], dtype=total.dtype)
    # Of nodes that differ, each divides by its own; or all by that of the first.
    of_each = view.of_the_ranks(total / local[:, None])
    sizes = sorted(set(local.tolist()))
    return Way(of_each), *(Way(view.everywhere(total / size)) for size in sizes if len(sizes) > 1)


def factors(view: View) -> Sequence[Factor]:
    sizes = {row.local_world_size for row in view.layout.rows}
    if len(sizes) > 1 or view.layout.nodes == 1 or view.is_sum():
        return ()
    return (Factor(view.world_size / sizes.pop(), "ranks of all nodes over ranks of one"),)


HYPOTHESIS = Hypothesis(
    name="divided_by_local_world_size",
    sentence="Gradients were added over all ranks and divided by the ranks of one node.",
    look_at="a divisor taken from LOCAL_WORLD_SIZE or torch.cuda.device_count(): "
    "dist.get_world_size() is meant",
    predict=predict,
    factors=factors,
    tell_apart="nodes with several ranks, such as 2x4, where all counts differ",
)
