"""A parameter requires no gradient on some rank, which then brings nothing to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    if view.world_size == 1 or not view.differing:
        return ()
    return tuple(way for own in view.owns for way in _without(view, own))


def _without(view: View, found: Tensor) -> Sequence[Way]:
    frozen = _frozen(view)
    right = view.everywhere(view.expected)
    ways = []
    for rank in [rank for rank in range(view.world_size) if not frozen or rank in frozen]:
        others = [other for other in range(view.world_size) if other != rank]
        without = view.everywhere(found[others].sum(0) / view.world_size)
        detail = f"{indications.listed([rank])}: {', '.join(sorted(view.differing)[:4])}"
        ways.append(Way(view.mix(without, right, view.differing), detail))
        # Its own gradient may be left out on that rank alone, as None or as zero.
        own = without.clone()
        if rank in view.ranks:
            own[view.ranks.index(rank)] = torch.zeros_like(view.expected)
            ways.append(Way(view.mix(own, right, view.differing), detail))
    return tuple(ways)


def _frozen(view: View) -> set[int]:
    """Ranks on which a differing parameter is frozen, though not on all."""
    return {
        rank
        for rank, seen in view.observed.items()
        for name in seen.frozen
        if name in view.differing and any(name not in o.frozen for o in view.observed.values())
    }


def sign(view: View) -> Sign | None:
    if not view.observed:
        return None
    frozen = sorted(_frozen(view))
    return indications.only_if(
        bool(frozen),
        f"requires_grad was False there on {indications.listed(frozen)}",
        "requires_grad was the same on all ranks",
        decides=True,
    )


HYPOTHESIS = Hypothesis(
    name="parameter_frozen_on_one_rank",
    sentence="A parameter requires no gradient on one rank, which brings nothing to its average.",
    look_at="requires_grad set under a condition that is not the same on all ranks",
    predict=predict,
    sign=sign,
    tell_apart="nothing in the gradients: requires_grad on each rank",
)
