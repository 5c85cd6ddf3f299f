"""How far other, equally right gradients lie from the true ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import Gradients
from ddp_equivalence.comparison.tolerance import ZERO, Noise
from ddp_equivalence.reference import Reference


def noise_of(truth: Gradients, other: Gradients) -> dict[GradientKey, Noise]:
    """The distance of each gradient in ``other`` from the true one."""
    noise = {}
    for key, expected in truth.items():
        value = other.get(key)
        if expected is None or value is None or expected.numel() == 0:
            noise[key] = Noise()
            continue
        expected = expected.to_dense()
        difference = (value.to_dense().double() - expected).abs()
        norm, rms = difference.norm().item(), expected.norm() / math.sqrt(expected.numel())
        scale = expected.abs().clamp(min=rms.item())
        element = (difference / scale).max().item() if norm > 0 else 0.0
        noise[key] = Noise(norm, element)
    return noise


def noise_of_weights(reference: Reference) -> dict[GradientKey, Noise]:
    """The noise of updates that comes from rounding the weights.

    An update is the difference of two weights, and each of them is rounded at its own size.
    """
    noise = dict.fromkeys(reference.expected, Noise())
    weights = dict(build_model(reference.case).named_parameters())
    for key, update in reference.expected.items():
        if update is None or not update.numel():
            continue
        weight = weights[key[1]].detach()
        half = torch.finfo(weight.dtype).eps / 2 * weight.double()
        noise[key] = noise_of({key: update}, {key: update.to_dense() + half})[key]
    return noise


def larger_noise(
    noise: Mapping[GradientKey, Noise], other: Mapping[GradientKey, Noise]
) -> dict[GradientKey, Noise]:
    """The larger noise of each gradient."""
    return {
        key: Noise(
            max(noise[key].norm, other[key].norm), max(noise[key].element, other[key].element)
        )
        for key in noise
    }


def largest_ratio(truth: Gradients, noise: Mapping[GradientKey, Noise]) -> float:
    """The noise of each gradient divided by its norm: the largest of these ratios.

    Gradients that are zero except for rounding do not count.
    """
    norms = {key: float(value.norm()) for key, value in truth.items() if value is not None}
    whole = math.hypot(*norms.values())
    ratios = (noise[key].norm / norm for key, norm in norms.items() if norm > ZERO * whole)
    return max(ratios, default=0.0)


def relative_noise(truth: Gradients, noise: Mapping[GradientKey, Noise]) -> float:
    """The noise of all gradients together, divided by their norm."""
    squares = [value.to_dense().norm().item() ** 2 for value in truth.values() if value is not None]
    norm, moved = math.sqrt(sum(squares)), math.sqrt(sum(one.norm**2 for one in noise.values()))
    return moved / norm if norm > 0 else 0.0
