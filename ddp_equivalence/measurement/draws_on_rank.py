"""Adds to what was seen of a rank the random numbers that it drew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.random_draws import DrawLog


def with_draws(
    observed: Observation,
    log: DrawLog | None,
    gradients: Mapping[GradientKey, Tensor | None],
    sample: ElementSample[str] | None,
) -> Observation:
    """``gradients``: what the step left when these numbers were drawn."""
    if log is None or sample is None or not log.complete:
        return observed
    left = {
        name: sample.of_one(name, gradient)
        for (step, name), gradient in gradients.items()
        if step == 0 and gradient is not None and name in sample.sizes
    }
    return replace(observed, draws=tuple(log.draws), left=left)
