"""Tells that hooks limit each rank's own gradient on its way to the reduction.

Then the ranks average rightly what is no part of the big batch's gradient any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes import clipped_before_reduce
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.observed_scripts.as_case import OWN, ObservedStep
from ddp_equivalence.observed_scripts.coupled_rows import CERTAIN, is_loss_additive
from ddp_equivalence.observed_scripts.gradient_sums import (
    holds_the_mean_of_own,
    left_over,
    rounding_of,
)
from ddp_equivalence.observed_scripts.running_script import CannotReplay

Gradients = Mapping[str, Tensor | None]


def limited_by_hooks(step: ObservedStep, view: View | None) -> Iterator[Finding]:
    """The finding, if hooks of parameters were seen, many elements of each rank's own gradient have
    the same, largest size, and the others are what the rank's rows give. ``view``: of the step.
    """
    hooks = [] if view is None else view.observed.calls.places(Kind.TENSOR_HOOK)
    hooks = [place for place in hooks if any(call.names for call in place.calls)]
    ranks = range(step.record.world_size)
    if not hooks or not all(_is_any_limited(step, rank) for rank in ranks):
        return
    own = [step.gradients(rank, OWN) for rank in ranks]
    try:
        alone = [step.computed_alone(step.rows_by_rank[rank]) for rank in ranks]
        together = step.computed_alone(step.everything)
        if not is_loss_additive(step):
            return  # then the mean of the ranks' own gradients is another one without any hook
    except CannotReplay:
        return
    most = rounding_of(together)
    if not holds_the_mean_of_own(step):
        return
    if not all(_others_are_right(step, rank, alone[rank], most) for rank in ranks):
        return
    left = left_over(together, own)
    if left <= CERTAIN * most:
        return
    yield Finding(
        cause=clipped_before_reduce.NAME,
        sentence="Hooks limit the elements of each rank's own gradient before the average",
        look_at="Tensor.register_hook: a hook of a parameter runs before DDP reduces its gradient",
        accepted=True,
        headline="hooks clip each rank's gradient before the reduction",
        because="many elements of a rank's own gradient have the same, largest size; "
        f"{text_of(left, '.2g')} of the big batch's gradient is no mixture of the ranks' own",
        fix="clip after the gradients of all ranks are reduced, before the optimizer steps.",
        lines=_lines(step, hooks),
    )


def _lines(step: ObservedStep, hooks: Sequence[Place]) -> tuple[PointedLine, ...]:
    """The lines that register hooks of the parameters whose gradients are limited."""
    limited = {
        name
        for rank in range(step.record.world_size)
        for of_pass in _passes(step, rank)
        for name in of_pass
        if _limits({name: of_pass[name]})
    }
    note = "the hook changes this rank's own gradient"
    on_these = [
        place for place in hooks if any(limited.intersection(call.names) for call in place.calls)
    ]
    return tuple(place.pointed(note, is_fault=len(on_these) == 1) for place in on_these)


def _passes(step: ObservedStep, rank: int) -> Sequence[Gradients]:
    """The rank's own gradients of each backward pass."""
    reader = step.record.reader(rank, step.number)
    count = len(reader.step.losses)
    found = [reader.below(f"own_of_{number}/") for number in range(count)] if count > 1 else []
    return [{step.short(name): one for name, one in of_pass.items()} for of_pass in found] or [
        step.gradients(rank, OWN)
    ]


def _is_any_limited(step: ObservedStep, rank: int) -> bool:
    return any(_limits(of_pass) for of_pass in _passes(step, rank))


def _limits(gradients: Gradients) -> set[float]:
    """The sizes that more elements of a parameter's gradient have than by chance, and that none of
    its elements exceeds.
    """
    found = set()
    for gradient in gradients.values():
        if gradient is None or not gradient.any():
            continue
        sizes = gradient.abs()
        largest = sizes.max()
        if int((sizes == largest).sum()) > 1 + gradient.numel() // 1000:
            found.add(float(largest))
    return found


def _others_are_right(step: ObservedStep, rank: int, alone: Gradients, most: float) -> bool:
    """True if the elements that no hook limited in any pass are those that the rows give alone."""
    own, passes = step.gradients(rank, OWN), _passes(step, rank)
    limits = [torch.tensor(sorted(_limits(of_pass)), dtype=torch.float64) for of_pass in passes]
    off = of_all = 0.0
    for name, gradient in own.items():
        its = alone.get(name)
        if gradient is None or its is None:
            continue
        free = torch.ones_like(gradient, dtype=torch.bool)
        for of_pass, limits_of_pass in zip(passes, limits, strict=True):
            one = of_pass.get(name)
            if one is not None:
                free &= ~torch.isin(one.abs().double(), limits_of_pass)
        off += float((gradient.double() - its.double())[free].square().sum())
        of_all += float(its.double().square().sum())
    return of_all > 0 and (off / of_all) ** 0.5 <= most
