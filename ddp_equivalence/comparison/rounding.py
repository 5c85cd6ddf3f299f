"""How far rounding alone moves the gradient of the big batch on one device.

The big batch is computed again in other, equally right ways: in the case's own precision, with the
examples in reverse order, with weights and inputs moved by one eps, and with the loss scaled before
backward. How far these results lie from the float64 reference is the rounding of one device. It is
measured for each parameter by itself: a part of the model with little weight in the loss has small
gradients, and rounding moves them as little. What a model computes in float32 inside float64 is
nudged by eps of float32 (``low_precision.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.case.build import build_batches, build_model
from ddp_equivalence.case.precision import cast_model
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.gradients import Gradients
from ddp_equivalence.comparison.low_precision import NudgedInside
from ddp_equivalence.comparison.noise import (
    larger_noise,
    largest_ratio,
    noise_of,
    noise_of_weights,
    relative_noise,
)
from ddp_equivalence.comparison.nudges import nudge_each
from ddp_equivalence.comparison.tolerance import Noise
from ddp_equivalence.reference import Reference, in_dtype, loss_of_the_case, train

SCALE = 3.0
"""The loss is multiplied by this before backward, and the gradients are divided by it afterwards.
It is no power of two, so every operation rounds differently, also in a part of the model or loss
that computes in float32 inside a float64 model."""

MORE_SCALES = (5.0, 7.0, 11.0, 13.0)
"""The factors of the further runs that are made where the first ones may have been small by luck.
"""

AMPLIFIED = 1e4
"""Rounding of more than this many eps was amplified, by an ill-conditioned model or by training
that diverges. How large it is then depends on luck, so it is measured several times."""

NUDGES = 5
"""How often amplified rounding is measured."""

OF_ORDER = 32.0
"""Another order of the examples matters if it moves the gradient by more than this many times what
rounding inside the model moves it."""

EPS = torch.finfo(torch.float64).eps

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rounding:
    """How far rounding alone moves the big batch on one device.

    ``noise`` has the noise of every gradient. ``order_matters`` is True if reversing the order of
    the examples changes the gradient by more than rounding. ``inside``: the least precise dtype in
    which the model computes a part of the big batch in float64; None if it does not.
    """

    noise: dict[GradientKey, Noise]
    order_matters: bool
    inside: torch.dtype | None = None


def measure_rounding(
    reference: Reference,
    batches: Sequence[Any] | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device = CPU,
) -> Rounding:
    """Compute the big batch again in other, equally right ways, and compare with the reference.

    ``batches``: the big batches of the reference; they are built if they are not given.
    ``autocast``: the dtype of the autocast region in which the forward pass runs, if any.
    ``device``: the device that computes the big batch again.
    """
    again = partial(_train_again, reference, autocast=autocast, device=device)
    case, expected = reference.case, reference.expected
    if batches is None:
        batches = build_batches(case, reference.steps)
    reversed_batches = [
        take(batch, range(size)[::-1], case.batch_dims)
        for batch, size in zip(batches, reference.examples, strict=True)
    ]
    if reference.computed_in is None:
        same, other = again(batches, None), again(reversed_batches, None)
        return _in_own_precision(reference, noise_of(expected, same), noise_of(expected, other))
    in_float64 = reference.lowest_dtype is torch.float64
    inside = NudgedInside(1)
    if in_float64:
        noise = noise_of_other_order = in_other_order = noise_of(
            expected, again(reversed_batches, torch.float64, nudge=1, inside=inside)
        )
    else:
        noise = noise_of(expected, again(batches, None, scale=1))
        noise_of_other_order = noise_of(expected, again(reversed_batches, None))
        # In float64, because a lower precision would take much for rounding that is none.
        in_other_order = noise_of(
            expected, again(reversed_batches, torch.float64, autocast=None, inside=inside)
        )
    order_matters = False
    if relative_noise(expected, in_other_order) > math.sqrt(EPS):
        nudged = again(batches, torch.float64, nudge=1, autocast=None, inside=NudgedInside(2))
        in_same_order = noise_of(expected, nudged)
        order_matters = _moves_more(expected, in_other_order, in_same_order, inside)
        noise = in_same_order if in_float64 else noise
    if not order_matters:
        noise = larger_noise(noise, noise_of_other_order)
    elif inside.lowest is None or not in_float64:
        return Rounding(noise, order_matters=True)
    if in_float64 and largest_ratio(expected, noise) > AMPLIFIED * EPS:
        for nudge in range(2, NUDGES + 1):
            again_inside = NudgedInside(nudge + 1)
            moved = again(batches, torch.float64, nudge=nudge, inside=again_inside)
            noise = larger_noise(noise, noise_of(expected, moved))
    if reference.compare == "update":
        noise = larger_noise(noise, noise_of_weights(reference))
    return Rounding(noise, order_matters, inside.lowest if in_float64 else None)


def _in_own_precision(
    reference: Reference,
    noise: dict[GradientKey, Noise],
    noise_of_other_order: dict[GradientKey, Noise],
) -> Rounding:
    """The rounding where the reference itself is rounded as one device rounds."""
    eps = torch.finfo(reference.lowest_dtype).eps
    truth = reference.expected
    usual = max(eps, relative_noise(truth, noise))
    order_matters = relative_noise(truth, noise_of_other_order) > OF_ORDER * usual
    if not order_matters:
        noise = larger_noise(noise, noise_of_other_order)
    if reference.compare == "update":
        noise = larger_noise(noise, noise_of_weights(reference))
    return Rounding(noise, order_matters)


def _moves_more(
    truth: Gradients,
    in_other_order: Mapping[GradientKey, Noise],
    in_same_order: Mapping[GradientKey, Noise],
    inside: NudgedInside,
) -> bool:
    """True if another order of the examples moves more than rounding inside the model does."""
    if inside.lowest is None:
        return True
    return relative_noise(truth, in_other_order) > OF_ORDER * relative_noise(truth, in_same_order)


def measure_more(
    reference: Reference,
    rounding: Rounding,
    batches: Sequence[Any],
    autocast: torch.dtype | None = None,
    device: torch.device = CPU,
) -> Rounding:
    """The rounding of further runs, each with the examples in another order, and of ``rounding``.

    The error of a few runs may be small by luck, above all that of a parameter with few elements.
    """
    in_float64 = reference.lowest_dtype is torch.float64
    dims, noise = reference.case.batch_dims, rounding.noise
    for number, scale in enumerate(MORE_SCALES, start=1):
        shuffled = batches
        if not rounding.order_matters:
            shuffled = [
                take(batch, _order(size, number), dims)
                for batch, size in zip(batches, reference.examples, strict=True)
            ]
        gradients = _train_again(
            reference,
            shuffled,
            torch.float64 if in_float64 else None,
            nudge=NUDGES + number if in_float64 else 0,
            scale=scale,
            autocast=autocast,
            device=device,
            inside=NudgedInside(NUDGES + number + 1) if rounding.inside else None,
        )
        noise = larger_noise(noise, noise_of(reference.expected, gradients))
    return Rounding(noise, rounding.order_matters, rounding.inside)


def _order(examples: int, number: int) -> list[int]:
    """A random order of the examples."""
    generator = torch.Generator().manual_seed(number)
    order: list[int] = torch.randperm(examples, generator=generator).tolist()
    return order


def _train_again(
    reference: Reference,
    batches: Sequence[Any],
    dtype: torch.dtype | None,
    nudge: int = 0,
    scale: float = SCALE,
    autocast: torch.dtype | None = None,
    device: torch.device = CPU,
    inside: NudgedInside | None = None,
) -> Gradients:
    """Train as the reference did, but with other rounding on the way.

    ``dtype``: the dtype of model and batches; with None, the case's own. ``nudge``: the number of
    the random pattern by which weights and inputs move one eps up or down; 0 for none. ``scale``:
    multiply the loss by it and divide the gradients by it. ``autocast``: the dtype of the autocast
    region in which the forward pass runs; None for none. ``inside``: nudges what the model computes
    in a lower precision.
    """
    case = reference.case
    model = build_model(case)
    if dtype is not None:
        cast_model(model, dtype)
    copies = [in_dtype(batch, dtype) for batch in batches]
    if nudge:
        nudge_each(model.parameters(), nudge)
        for batch in copies:
            nudge_each((leaf for leaf in tensors_of(batch)), nudge)
    if device != CPU:
        model.to(device)
        copies = [move(batch, device) for batch in copies]
    loss = loss_of_the_case(case)

    def divide_gradient(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad /= scale

    for parameter in model.parameters():
        if parameter.requires_grad and scale != 1 and not reference.training.is_of_the_user:
            parameter.register_post_accumulate_grad_hook(divide_gradient)

    def scaled_loss(model: nn.Module, batch: Any) -> Any:
        with nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast):
            return scale * loss(model, batch)

    with inside or nullcontext():
        gradients = train(
            case,
            model,
            copies,
            reference.compare,
            reference.training,
            scaled_loss,
            at_each_step=reference.at_each_step,
            after_clipping=reference.after_clipping,
        )[0]
    return {key: None if one is None else one.to(CPU) for key, one in gradients.items()}
