"""What was measured and seen, put before the hypotheses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.measure import Measurement
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.strategies.sharded_batch import Indices

Kept = Mapping[int, Mapping[GradientKey, Tensor]]


def taken_apart(
    view: View,
    found: Measurement,
    observed: Mapping[int, Observation],
    step: int,
    unrepeatable: bool,
) -> View:
    """The view of one step with what was measured and observed in it.

    What the ranks read tells the micro-batches of a step of one's own.
    """
    beyond = {one.key for one in found.comparison.parameters if not (one.same and one.ranks_agree)}
    seen = replace(
        view,
        measured=torch.stack([_joined(view, found.measured[rank], step) for rank in view.ranks]),
        differing=frozenset(name for name in view.shapes if (step, name) in beyond),
        observed=observed,
        unrepeatable=unrepeatable,
    )
    if not view.case.is_catalogue and seen.read is not None and _is_the_deal(seen, seen.read):
        seen = replace(seen, parts=seen.read)
    return seen


def first_wrong_step(comparison: Comparison, steps: int) -> int:
    """The first step with a parameter beyond its limit: the weights before it were still right."""
    return min((one.key[0] for one in comparison.differing), default=steps - 1)


def repeats(measured: Kept, observed: Mapping[int, Observation]) -> bool | None:
    """True if the second run left the same bits on every rank; None if there was none."""
    if not observed:
        return None
    return all(
        digest({key[1]: value}) == observed[rank].gradients.get(key)
        for rank, of_rank in measured.items()
        for key, value in of_rank.items()
        if rank in observed
    )


def _joined(view: View, measured: Mapping[GradientKey, Tensor], step: int) -> Tensor:
    values = {name: measured[step, name] for name in view.shapes if (step, name) in measured}
    return view.selection.joined(values)


def _is_the_deal(view: View, read: tuple[tuple[Indices, ...], ...]) -> bool:
    """True if each rank read what it was given, or takes its examples itself."""
    if view.dealt is None:
        return True
    return all(
        sorted(i for part in parts for i in part) == sorted(given)
        for parts, given in zip(read, view.dealt, strict=True)
    )
