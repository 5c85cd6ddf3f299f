"""Puts what was measured and observed on the ranks into the view of a step."""

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


def with_measurement(
    view: View,
    measurement: Measurement,
    observed: Mapping[int, Observation],
    step: int,
    left_other_bits: bool,
) -> View:
    """The view with what the ranks hold after this step, and with what they were seen to do.

    ``left_other_bits``: True if the watched second run left other gradients than the first. The
    micro-batches of a user's own step are known only from the examples that it was seen to read.
    """
    comparison, ranks = measurement.comparison, view.setting.reporting_ranks
    differing = {p.key for p in comparison.parameters if not (p.same and p.ranks_agree)}
    measured = replace(
        view.measured,
        by_rank=torch.stack([_joined(view, measurement.measured[rank], step) for rank in ranks]),
        differing=frozenset(name for name in view.parameters.names if (step, name) in differing),
    )
    observed_step = replace(
        view.observed,
        by_rank=observed,
        left_other_bits=left_other_bits,
        first_run={rank: one.collectives for rank, one in measurement.evidence.items()},
    )
    with_both = replace(view, measured=measured, observed=observed_step)
    read = observed_step.examples_read
    if not view.setting.case.is_catalogue and read is not None and _read_own_shards(view, read):
        return replace(with_both, parts=replace(with_both.parts, by_rank=read))
    return with_both


def first_wrong_step(comparison: Comparison, steps: int) -> int:
    """The first step with a parameter beyond its limit: the weights before it were still right."""
    return min((parameter.key[0] for parameter in comparison.differing), default=steps - 1)


def left_same_bits(
    measured: Mapping[int, Mapping[GradientKey, Tensor]], observed: Mapping[int, Observation]
) -> bool | None:
    """True if the second run left the same bits on every rank; None if there was no second run."""
    if not observed:
        return None
    return all(
        digest({key[1]: gradient}) == observed[rank].gradients.get(key)
        for rank, gradients in measured.items()
        for key, gradient in gradients.items()
        if rank in observed
    )


def _joined(view: View, measured: Mapping[GradientKey, Tensor], step: int) -> Tensor:
    """The sampled elements of all parameters in this step, shape (elements,)."""
    names = view.parameters.names
    return view.parameters.sample.joined(
        {name: measured[step, name] for name in names if (step, name) in measured}
    )


def _read_own_shards(view: View, read: tuple[tuple[Indices, ...], ...]) -> bool:
    """True if each rank read the examples that it was given, or if it was given none."""
    if view.setting.shards is None:
        return True
    return all(
        sorted(index for part in parts for index in part) == sorted(shard)
        for parts, shard in zip(read, view.setting.shards, strict=True)
    )
