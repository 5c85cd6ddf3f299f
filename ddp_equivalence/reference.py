"""The one big batch: one process, one forward, one backward, in float64. No strategy, no wrapper.

Besides the truth it measures, when asked, what rounding alone does to it: the same big batch in the
case's own precision, and once more with the examples in reverse order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch import count_examples, take
from ddp_equivalence.case.build import build_batches, build_model, loss_of
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.random_state import seeded, step_seed
from ddp_equivalence.case.steps import Compare, Steps, in_step
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.gradients import (
    Description,
    describe,
    gradients_of,
    sgd_step,
    updates_of,
    weights_of,
)
from ddp_equivalence.comparison.tolerance import Noise

SCALE = 3.0
"""Of a loss, before backward, for a second look at rounding: no power of two, so that it rounds
wherever the model or loss computes, in float32 inside a float64 model too."""


@dataclass(frozen=True)
class Rounding:
    """What rounding alone does to the big batch on one device: ``noise`` by name.

    ``order_matters``: the big batch in another order gives another gradient, beyond rounding.
    """

    noise: dict[str, Noise]
    order_matters: bool


@dataclass(frozen=True)
class Reference:
    """What every rank is compared with.

    ``expected``: parameter name -> gradient (or update) of the big batch, float64, or None.
    ``described``: what it has to be in the case's own precision. ``start``: digest of the weights
    before the first step. ``dtype``: the lowest of a parameter. ``examples``: of each step, and
    ``losses`` at its beginning.
    """

    case: Case
    compare: Compare
    lr: float
    steps: Steps
    expected: dict[str, Tensor | None]
    described: dict[str, Description | None]
    start: str
    dtype: torch.dtype
    examples: tuple[int, ...]
    losses: tuple[float, ...] = ()

    @cached_property
    def rounding(self) -> Rounding:
        """Measured when asked for: gradients within the least limit need not know."""
        batches = build_batches(self.case, self.steps)
        return _rounding(self.case, batches, self.compare, self.lr, self.dtype, self.expected)


def big_batch(
    case: Case, compare: Compare = "gradients", lr: float = 0.1, steps: Steps = 1
) -> Reference:
    """Compute the reference of a case. Raises BadCase for whatever the case's builders do wrong."""
    model, batches = build_model(case), build_batches(case, steps)
    start = digest(dict(model.named_parameters()))
    dtypes = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    examples = tuple(map(count_examples, batches))
    built = [model]
    del model
    losses: list[float] = []
    expected = _train(case, batches, compare, lr, dtype=torch.float64, built=built, losses=losses)
    return Reference(
        case=case,
        compare=compare,
        lr=lr,
        steps=steps,
        expected=expected,
        described=_in_own_precision(expected, dtypes, 1 if compare == "update" else len(batches)),
        start=start,
        dtype=max(dtypes.values(), key=lambda dtype: torch.finfo(dtype).eps),
        examples=examples,
        losses=tuple(losses),
    )


def _in_own_precision(
    expected: dict[str, Tensor | None], dtypes: dict[str, torch.dtype], steps: int
) -> dict[str, Description | None]:
    """A gradient has the dtype of its parameter."""
    own = {in_step(name, step, steps): dtypes[name] for name in dtypes for step in range(steps)}
    return {name: one and replace(one, dtype=own[name]) for name, one in describe(expected).items()}


def loss_and_gradient_of(
    case: Case,
    batch: Any,
    before: Sequence[Any] = (),
    lr: float = 0.1,
    generator: bytes = b"",
) -> tuple[float, dict[str, Tensor | None]]:
    """The float64 loss on ``batch`` alone and its gradient, after plain SGD on those ``before``.

    ``generator``: the state of torch's generator that the forward pass begins with, if not its own.
    """
    losses: list[float] = []
    batches = [*before, batch]
    found = _train(
        case, batches, "gradients", lr, dtype=torch.float64, losses=losses, generator=generator
    )
    steps = len(batches)
    return losses[-1], {
        name: found[in_step(name, steps - 1, steps)] for name in _names(found, steps)
    }


def _names(found: dict[str, Tensor | None], steps: int) -> list[str]:
    first = " (step 1)"
    return [name.removesuffix(first) for name in found if steps == 1 or name.endswith(first)]


def _rounding(
    case: Case,
    batches: Sequence[Any],
    compare: Compare,
    lr: float,
    lowest: torch.dtype,
    expected: dict[str, Tensor | None],
) -> Rounding:
    """How far rounding moves the gradient, in the case's own precision."""
    backwards = [take(batch, range(count_examples(batch))[::-1]) for batch in batches]
    if lowest is torch.float64:
        other = _train(case, backwards, compare, lr, torch.float64, nudge=1, scale=SCALE)
        noise = moved = _noise(expected, other)
        plausible = math.sqrt(torch.finfo(lowest).eps)
    else:
        single = _train(case, batches, compare, lr, dtype=None)
        noise = _noise(expected, single)
        del single
        other = _train(case, backwards, compare, lr, dtype=None, scale=SCALE)
        plausible = 100 * max(_relative(expected, noise), torch.finfo(lowest).eps)
        moved = _noise(expected, other)
    if _relative(expected, moved) <= plausible:
        noise = {name: _worse(noise[name], moved[name]) for name in noise}
        if lowest is torch.float64 and _largest(expected, noise) > AMPLIFIED * EPS:
            noise = _of_more_nudges(case, batches, compare, lr, expected, noise)
        if compare == "update":
            noise = _with_weights(case, expected, noise)
        return Rounding(noise, False)
    if lowest is torch.float64:
        del other
        other = _train(case, batches, compare, lr, torch.float64, nudge=1, scale=SCALE)
        noise = _noise(expected, other)
    return Rounding(noise, True)


def _of_more_nudges(
    case: Case,
    batches: Sequence[Any],
    compare: Compare,
    lr: float,
    expected: dict[str, Tensor | None],
    noise: dict[str, Noise],
) -> dict[str, Noise]:
    """The worst of several: what amplifies rounding makes a single one a matter of luck."""
    for nudge in range(2, NUDGES + 1):
        other = _train(case, batches, compare, lr, torch.float64, nudge=nudge, scale=SCALE)
        more = _noise(expected, other)
        noise = {name: _worse(noise[name], more[name]) for name in noise}
    return noise


AMPLIFIED = 1e4
"""Rounding beyond so many eps was amplified: by an ill-conditioned model, or diverging training."""

NUDGES = 5


def _train(
    case: Case,
    batches: Sequence[Any],
    compare: Compare,
    lr: float,
    dtype: torch.dtype | None,
    nudge: int = 0,
    scale: float = 1.0,
    built: list[nn.Module] | None = None,
    losses: list[float] | None = None,
    generator: bytes = b"",
) -> dict[str, Tensor | None]:
    """One step a batch with plain SGD between; dtype None keeps the case's own.

    ``built``: holds a model that nobody else needs. ``nudge`` (which of several, 0 for none) and
    ``scale`` change nothing but how values are rounded on their way. ``losses``: gets the loss of
    every step. ``generator``: state of torch's generator before each forward pass.
    """
    model = built.pop() if built else build_model(case)
    if dtype is not None:
        model.to(dtype)
    if nudge:
        _nudge(model.parameters(), nudge)
    before = weights_of(model) if compare == "update" else {}
    found: dict[str, Tensor | None] = {}
    for step, batch in enumerate(batches):
        model.zero_grad(set_to_none=True)
        # A copy: a loss may change its batch in place.
        batch = pytree.tree_map_only(Tensor, lambda leaf: _in(leaf, dtype), batch)
        if nudge:
            leaves = pytree.tree_leaves(batch)
            _nudge((leaf for leaf in leaves if isinstance(leaf, Tensor)), nudge)
        with seeded(step_seed(case, step)):
            if generator:
                torch.set_rng_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
            loss = _loss(case, model, batch)
            if losses is not None:
                losses.append(loss.item())
            _backward(case, scale * loss)
            del loss
        if scale != 1.0:
            _divide_gradients(model, scale)
        if compare == "gradients":
            gradients = gradients_of(model)
            found |= {in_step(name, step, len(batches)): g for name, g in gradients.items()}
        if compare == "update" or step + 1 < len(batches):
            sgd_step(model, lr)
    return found if compare == "gradients" else updates_of(model, before)


def _loss(case: Case, model: nn.Module, batch: Any) -> Tensor:
    name = name_of(case.loss)
    try:
        loss = loss_of(case)(model, batch)
    except Exception as error:
        right = f"(model, batch) -> scalar tensor; it raised {type(error).__name__}: {error}"
        if "dtype" in str(error) or "Double" in str(error):
            right += (
                " (the truth is computed in float64: build constants with the dtype of the input)"
            )
        raise BadCase("loss", name, right) from error
    if not isinstance(loss, Tensor):
        raise BadCase("loss", name, f"a scalar tensor, not {type(loss).__name__}")
    if loss.ndim != 0:
        raise BadCase("loss", name, f"a scalar tensor, not one of shape {tuple(loss.shape)}")
    if not loss.requires_grad:
        right = "a scalar tensor with a graph; this one requires no gradient (detach or no_grad?)"
        raise BadCase("loss", name, right)
    return loss


def _backward(case: Case, loss: Tensor) -> None:
    try:
        loss.backward()
    except Exception as error:
        right = f"a loss that can go backward; it raised {type(error).__name__}: {error}"
        raise BadCase("loss", name_of(case.loss), right) from error


def _in(leaf: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not leaf.is_floating_point():
        return leaf.clone()
    return leaf.to(dtype, copy=True)


def _divide_gradients(model: nn.Module, divisor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= divisor


def _nudge(tensors: Any, number: int) -> None:
    """Move every value by one eps, up or down: what a differently rounded input would be.

    Whole numbers stay: they may be labels or flags, and are rarely rounded.
    """
    with torch.no_grad():
        for place, tensor in enumerate(tensors, start=(number - 1) * PLACES):
            if tensor.is_floating_point():
                nudged = tensor * _factors(place, tensor.numel(), tensor.dtype).view(tensor.shape)
                tensor.copy_(torch.where(tensor == tensor.round(), tensor, nudged))


PLACES = 10_000
"""Between the seeds of one nudge and the next."""


def _factors(place: int, count: int, dtype: torch.dtype) -> Tensor:
    """1 + eps or 1 - eps for each of the values in this place, at random."""
    return (_small_factors if count <= MOST_REMEMBERED else _random_factors)(place, count, dtype)


def _random_factors(place: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(place)
    signs = torch.randint(2, (count,), generator=generator, dtype=torch.int8).to(dtype)
    return signs.mul_(2).sub_(1).mul_(torch.finfo(dtype).eps).add_(1)


_small_factors = lru_cache(maxsize=64)(_random_factors)

MOST_REMEMBERED = 4096
"""Values in a place up to which the factors are kept for the next check."""


def _noise(truth: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> dict[str, Noise]:
    found = {}
    for name, expected in truth.items():
        value = other.get(name)
        if expected is None or value is None or expected.numel() == 0:
            found[name] = Noise()
            continue
        expected = expected.to_dense()
        difference = (value.to_dense().double() - expected).abs()
        norm, rms = difference.norm().item(), expected.norm() / math.sqrt(expected.numel())
        scale = expected.abs().clamp(min=rms.item())
        element = (difference / scale).max().item() if norm > 0 else 0.0
        found[name] = Noise(norm, element)
    return found


EPS = torch.finfo(torch.float64).eps


def _largest(truth: dict[str, Tensor | None], noise: dict[str, Noise]) -> float:
    """The largest noise of a parameter over its own norm."""
    norms = {name: float(value.norm()) for name, value in truth.items() if value is not None}
    return max((noise[name].norm / norm for name, norm in norms.items() if norm > 0), default=0.0)


def _with_weights(
    case: Case, truth: dict[str, Tensor | None], noise: dict[str, Noise]
) -> dict[str, Noise]:
    """An update is the difference of weights, which are rounded at their own size."""
    found = dict(noise)
    for name, weight in build_model(case).named_parameters():
        value = truth.get(name)
        if value is None or not value.numel():
            continue
        half = torch.finfo(weight.dtype).eps / 2 * weight.detach().double()
        rounded: dict[str, Tensor | None] = {name: value.to_dense() + half}
        found[name] = _worse(noise[name], _noise({name: value}, rounded)[name])
    return found


def _worse(one: Noise, other: Noise) -> Noise:
    return Noise(max(one.norm, other.norm), max(one.element, other.element))


def _relative(truth: dict[str, Tensor | None], noise: dict[str, Noise]) -> float:
    """Noise of all parameters together over their norm."""
    norm = math.sqrt(sum(_square(value) for value in truth.values() if value is not None))
    moved = math.sqrt(sum(value.norm**2 for value in noise.values()))
    return moved / norm if norm > 0 else 0.0


def _square(value: Tensor) -> float:
    return float(value.to_dense().norm().item()) ** 2
