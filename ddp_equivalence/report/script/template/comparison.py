"""Compare every parameter on every rank with the big batch, and print the table."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from ddp_equivalence.report.script.template.placeholders import TOLERANCE, Gradients

# The smallest limits, in units of eps times the norm of one gradient, and of all together.
LIMITS = {torch.float64: (256, 4), torch.float32: (64, 4)}


Result = tuple[float, str]


def relative(value: float, norm: float) -> float:
    return value / norm if norm else (math.inf if value else 0.0)


def distance(gradient: Tensor, truth: Tensor) -> tuple[float, float]:
    """The norm of the difference, and the largest relative difference of an element."""
    difference = (gradient.double() - truth).abs().nan_to_num(math.inf)
    # The difference of a small element is relative to the mean element.
    scale = truth.abs().clamp(min=truth.norm() / max(1, truth.numel()) ** 0.5)
    elements = torch.where(difference > 0, difference / scale, 0.0)
    return difference.norm().item(), elements.max().item() if elements.numel() else 0.0


def compare(name: str, ranks: list[Gradients], expected: Gradients, rounded: Gradients) -> Result:
    """The error of the worst rank in units of its limit, and the parameter's line in the table.

    ``expected``: the big batch in float64. ``rounded``: the big batch in the dtype of the ranks.
    """
    gradients, truth, nearby = [g.get(name) for g in ranks], expected.get(name), rounded.get(name)
    present = [gradient for gradient in gradients if gradient is not None]
    if all(gradient is None or not gradient.any() for gradient in [truth, *gradients]):
        return 0.0, "no gradient anywhere, or zeros"
    if truth is None or nearby is None or len(present) < len(gradients):
        has = ["none" if gradient is None else "some" for gradient in [truth, *gradients]]
        return math.inf, f"gradients: {has[0]} in the big batch; {' '.join(has[1:])} on the ranks"
    if any((each.shape, each.dtype) != (truth.shape, nearby.dtype) for each in present):
        shapes = ", ".join(f"{tuple(each.shape)} {each.dtype}" for each in present)
        return math.inf, f"{shapes}; not {tuple(truth.shape)} {nearby.dtype}"
    eps, (own, together) = torch.finfo(nearby.dtype).eps, LIMITS.get(nearby.dtype, (8, 1))
    norm = truth.norm().item()
    all_norms = [each.norm().item() for each in expected.values() if each is not None]
    floor = together * eps * math.hypot(*all_norms)
    noise, element_noise = distance(nearby, truth)
    limit = TOLERANCE * max(own * eps * norm, 8 * noise, floor)
    element_floor = relative(floor, norm) * truth.numel() ** 0.5
    element_limit = TOLERANCE * max(8 * own * eps, 8 * element_noise, element_floor)
    errors, elements = zip(*(distance(each, truth) for each in present), strict=True)
    limits_away = max(relative(max(errors), limit), relative(max(elements), element_limit))
    relative_errors = " ".join(f"{relative(error, norm):.1e}" for error in errors)
    ratios = " ".join(f"{relative(each.double().norm().item(), norm):.3f}" for each in present)
    line = f"{relative(limit, norm):.1e}  {relative_errors} | {ratios}"
    if any(not torch.equal(each, present[0]) for each in present):
        return max(limits_away, math.nextafter(1, 2)), f"{line}  the bits differ between ranks"
    return limits_away, line


def print_table(results: dict[str, Result]) -> bool:
    """Print a line for every parameter, the worst (in six digits) first; True if any differs."""
    worst_first = sorted(results, key=lambda name: -float(f"{results[name][0]:.6g}"))
    width = max(map(len, results))
    print(f"{'parameter':{width}}    limit  relative error by rank | ratio of norms by rank")
    for name in worst_first:
        print(f"{name:{width}}  {results[name][1]}")
    wrong = sum(limits_away > 1 for limits_away, _ in results.values())
    if wrong:
        print(f"different: {wrong} of {len(results)} parameters, the worst is {worst_first[0]}")
    else:
        print(f"same: {len(results)} of {len(results)} parameters agree with one big batch")
    sys.stdout.flush()
    return wrong > 0
