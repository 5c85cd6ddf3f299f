"""The table: every parameter on every rank beside the big batch, the worst first."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.report.script.skeleton.placeholders import TOLERANCE, Gradients

# The least limits, in eps: of the norm of a parameter, and of all parameters together.
LIMITS = {torch.float64: (256, 4), torch.float32: (64, 4)}


def over(value: float, norm: float) -> float:
    return value / norm if norm else (math.inf if value else 0.0)


def distance(one: Tensor, truth: Tensor) -> tuple[float, float]:
    """Norm of the difference; its worst element, in units of the element or of their mean size."""
    difference = (one.double() - truth).abs().nan_to_num(math.inf)
    scale = truth.abs().clamp(min=truth.norm() / max(1, truth.numel()) ** 0.5)
    worst = torch.where(difference > 0, difference / scale, 0.0)
    return difference.norm().item(), worst.max().item() if one.numel() else 0.0


def compare(
    name: str, ranks: Sequence[Gradients], big: Gradients, single: Gradients
) -> tuple[float, str]:
    """How many limits the worst rank is away from the big batch, and what the table says of it.

    ``single`` is one device in the ranks' own precision: wrong by rounding alone.
    """
    measured, truth, nearby = [one.get(name) for one in ranks], big.get(name), single.get(name)
    found = [one for one in measured if one is not None]
    if not found and truth is None:
        return 0.0, "no gradient anywhere"
    if truth is None or nearby is None or len(found) < len(measured):
        has = ["none" if one is None else "some" for one in [truth, *measured]]
        return math.inf, f"gradients: {has[0]} in the big batch; {' '.join(has[1:])} on the ranks"
    if any((one.shape, one.dtype) != (truth.shape, nearby.dtype) for one in found):
        shapes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in found)
        return math.inf, f"{shapes}; not {tuple(truth.shape)} {nearby.dtype}"
    eps, (own, of_whole) = torch.finfo(nearby.dtype).eps, LIMITS.get(nearby.dtype, (8, 1))
    norm = truth.norm().item()
    whole = of_whole * eps * math.hypot(*(g.norm().item() for g in big.values() if g is not None))
    noise, element = distance(nearby, truth)
    limit = TOLERANCE * max(own * eps * norm, 8 * noise, whole)
    largest = TOLERANCE * max(8 * own * eps, 8 * element, over(whole, norm) * truth.numel() ** 0.5)
    away = [distance(one, truth) for one in found]
    off = max(max(over(all_, limit), over(worst, largest)) for all_, worst in away)
    errors = " ".join(f"{over(all_, norm):.1e}" for all_, _ in away)
    ratios = " ".join(f"{over(one.double().norm().item(), norm):.3f}" for one in found)
    text = f"{over(limit, norm):.1e}  {errors} | {ratios}"
    if any(not torch.equal(one, found[0]) for one in found):
        return max(off, math.nextafter(1, 2)), f"{text}  not the same bits on all ranks"
    return off, text


def print_table(lines: dict[str, tuple[float, str]]) -> bool:
    """Print it, the worst first; True if a parameter is not that of the big batch."""
    worst_first = sorted(lines, key=lambda name: -lines[name][0])
    width = max(map(len, lines))
    print(f"{'parameter':{width}}    limit  relative error by rank | ratio of norms by rank")
    for name in worst_first:
        print(f"{name:{width}}  {lines[name][1]}")
    wrong = sum(off > 1 for off, _ in lines.values())
    if wrong:
        print(f"different: {wrong} of {len(lines)} parameters, the worst is {worst_first[0]}")
    else:
        print(f"same: {len(lines)} of {len(lines)} parameters are those of one big batch")
    sys.stdout.flush()
    return wrong > 0
