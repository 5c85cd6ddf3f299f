"""What was measured and seen, put before the hypotheses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.case.steps import in_step
from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.measure import Measurement
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.strategies.sharded_batch import Indices

Kept = Mapping[int, Mapping[str, Tensor | None]]


def taken_apart(
    view: View,
    found: Measurement,
    observed: Mapping[int, Observation],
    step: int,
    steps: int,
    unrepeatable: bool,
) -> View:
    """The view of one step with what was measured and observed in it.

    What the ranks read tells the micro-batches of a step of one's own.
    """
    full = {name: in_step(name, step, steps) for name in view.parameters.names}
    beyond = {one.name for one in found.comparison.parameters if not (one.same and one.ranks_agree)}
    ranks = view.setting.reporting_ranks
    measured = replace(
        view.measured,
        by_rank=torch.stack([_joined(view, found.measured[rank], full) for rank in ranks]),
        differing=frozenset(name for name in full if full[name] in beyond),
    )
    observed_step = replace(view.observed, by_rank=observed, left_other_bits=unrepeatable)
    seen = replace(view, measured=measured, observed=observed_step)
    read = observed_step.examples_read
    if not view.setting.case.is_catalogue and read is not None and _is_the_deal(seen, read):
        seen = replace(seen, parts=replace(seen.parts, by_rank=read))
    return seen


def first_wrong_step(comparison: Comparison, steps: int) -> int:
    """The first step with a parameter beyond its limit: the weights before it were still right."""
    wrong = {one.name for one in comparison.differing}
    for step in range(1, steps):
        if any(name.endswith(in_step("", step - 1, steps)) for name in wrong):
            return step - 1
    return steps - 1


def repeats(measured: Kept, observed: Mapping[int, Observation]) -> bool | None:
    """True if the second run left the same bits on every rank; None if there was none."""
    if not observed:
        return None
    return all(
        digest({name: value}) == observed[rank].gradients.get(name)
        for rank, found in measured.items()
        for name, value in found.items()
        if value is not None and rank in observed
    )


def _joined(view: View, found: Mapping[str, Tensor | None], full: Mapping[str, str]) -> Tensor:
    values = {name: found.get(full[name]) for name in view.parameters.names}
    kept = {name: value for name, value in values.items() if value is not None}
    return view.parameters.sample.joined(kept)


def _is_the_deal(view: View, read: tuple[tuple[Indices, ...], ...]) -> bool:
    """True if each rank read what it was given, or takes its examples itself."""
    if view.setting.shards is None:
        return True
    return all(
        sorted(i for part in parts for i in part) == sorted(given)
        for parts, given in zip(read, view.setting.shards, strict=True)
    )
