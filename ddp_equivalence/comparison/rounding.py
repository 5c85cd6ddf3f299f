"""How far rounding alone moves the gradient of the big batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.case.batch import move, take
from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.case.build import (
    batches_of_steps,
    build_batches,
    build_model,
    build_whole_batch,
    cast_model,
)
from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.comparison.gradients import (
    DataByRank,
    Description,
    Gradients,
    describe,
    differing_leaf,
)
from ddp_equivalence.comparison.tolerance import ZERO, Noise
from ddp_equivalence.reference import Reference, in_dtype, loss_of_the_case, train

# The big batch is computed again in other, equally right ways: in the case's own precision, with
# the examples in reverse order, with weights and inputs moved by one eps, and with the loss
# scaled before backward. How far these results lie from the float64 reference is the rounding of
# one device. It is measured for each parameter by itself: a part of the model with little weight
# in the loss has small gradients, and rounding moves them as little. What a model computes in
# float32 inside float64 is nudged by eps of float32.

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
    # Large gradients are kept in float32, and are then known only so far.
    known_to = max(
        (torch.finfo(one.dtype).eps for one in expected.values() if one is not None), default=0.0
    )
    if relative_noise(expected, in_other_order) > max(math.sqrt(EPS), known_to):
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


def noise_of_one_run(
    reference: Reference, batches: Sequence[Any], autocast: torch.dtype | None = None
) -> dict[GradientKey, Noise]:
    """The noise of one run in the precision of the model, on the examples in their order."""
    gradients = _train_again(reference, batches, None, scale=1, autocast=autocast)
    return noise_of(reference.expected, gradients)


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
    case, micro_batches = reference.case, reference.micro_batches
    if micro_batches.count > 1:
        scale = 1.0  # the hook below would divide the first again after each other one
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
            micro_batches=micro_batches,
        )[0]
    return {key: None if one is None else one.to(CPU) for key, one in gradients.items()}


# Nudges move values by one eps, up or down at random, as other rounding could have moved them.

PLACES = 10_000
"""The distance between the random seeds of one nudge and those of the next."""

MOST_REMEMBERED = 4096
"""Factors are kept for the next check if they are for at most this many values."""


def nudge_each(tensors: Iterable[Tensor], number: int) -> None:
    """Move every value by one eps, up or down, as other rounding could have moved it.

    Whole numbers stay as they are: they may be labels or flags, and are rarely rounded.
    """
    with torch.no_grad():
        for place, tensor in enumerate(tensors, start=(number - 1) * PLACES):
            if tensor.is_floating_point() and tensor.layout is torch.strided:
                factors = _factors(place, tensor.numel(), tensor.dtype).view(tensor.shape)
                nudged = tensor * factors.to(tensor.device)
                tensor.copy_(torch.where(tensor == tensor.round(), tensor, nudged))


def _factors(place: int, count: int, dtype: torch.dtype) -> Tensor:
    """1 + eps or 1 - eps at random, for each of ``count`` values."""
    return (_small_factors if count <= MOST_REMEMBERED else _random_factors)(place, count, dtype)


def _random_factors(place: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(place)
    signs = torch.randint(2, (count,), generator=generator, dtype=torch.int8).to(dtype)
    return signs.mul_(2).sub_(1).mul_(torch.finfo(dtype).eps).add_(1)


_small_factors = lru_cache(maxsize=64)(_random_factors)


# How far other, equally right gradients lie from the true ones.


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


# How far rounding moves a model that computes in a lower precision than its weights have.
#
# Many models compute a part in float32 whatever dtype they are given: a loss of
# ``logits.float()``, a normalisation, a softmax. In a check in float64, such a part rounds a
# billion times as much as the rest. Nudging weights by one eps of float64 does not show it,
# because most values then round to the same float32 as before. So the values that are rounded to
# the lower precision are nudged themselves.

WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
"""In which dtype the result of an operation in a low precision is computed again."""


class NudgedInside(TorchDispatchMode):
    """Inside the block, values that were rounded to a dtype below float64 are nudged.

    Each of them moves up or down at random: by one eps of its own dtype, or by as much as it
    differs from the same operation in float64, whichever is more. A result that was not rounded
    stays as it is: a copy, a maximum, a whole number. So comparisons between values still hold.

    ``number``: the number of the random pattern. ``lowest``: the least precise dtype in which a
    value was rounded; None if none was.
    """

    def __new__(cls, number: int) -> NudgedInside:
        """One that torch's compiler leaves alone, if the compiler has been imported."""
        compiles = "torch._dynamo" in sys.modules
        made: NudgedInside = super().__new__(_NotCompiled if compiles else cls)
        return made

    def __init__(self, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.lowest: torch.dtype | None = None
        self._generator = torch.Generator().manual_seed(number)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because torch would otherwise import its compiler, which takes two seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if not any(map(_is_low, _leaves(result))) or not _makes_values(function):
            return result
        try:
            wide = function(*pytree.tree_map(_widened, args), **pytree.tree_map(_widened, kwargs))
        except (RuntimeError, TypeError):  # there is no such operation in float64
            return result
        rounded, spec = pytree.tree_flatten(result)
        exact = pytree.tree_leaves(wide)
        if len(rounded) != len(exact):
            return result
        moved = [self._moved(one, other) for one, other in zip(rounded, exact, strict=True)]
        return pytree.tree_unflatten(moved, spec)

    def _moved(self, rounded: Any, exact: Any) -> Any:
        """The value, or its elements, moved up or down wherever it differs from the exact one."""
        if not _is_low(rounded) or not isinstance(exact, Tensor) or exact.shape != rounded.shape:
            return rounded
        value = rounded.to(exact.dtype)
        off = (value - exact).abs()
        was_rounded = (off > 0) & off.isfinite()
        if not bool(was_rounded.any()):
            return rounded
        eps = torch.finfo(rounded.dtype).eps
        self.lowest = lower(self.lowest, rounded.dtype)
        signs = torch.randint(2, rounded.shape, generator=self._generator).to(rounded.device)
        moved = value + (2 * signs - 1) * torch.maximum(off, eps * value.abs())
        # The value is left alone where moving it would leave the range of its dtype.
        narrow = moved.to(rounded.dtype)
        return torch.where(was_rounded & narrow.isfinite(), narrow, rounded)


class _NotCompiled(NudgedInside):
    """As above, but torch disables its compiler for the method below."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_dispatch__(function, types, args, kwargs)


def lower(one: torch.dtype | None, other: torch.dtype | None) -> torch.dtype | None:
    """The less precise of two dtypes; None stands for no dtype."""
    given = [dtype for dtype in (one, other) if dtype is not None]
    return max(given, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _leaves(result: Any) -> Iterable[Any]:
    return (result,) if isinstance(result, Tensor) else pytree.tree_leaves(result)


def _is_low(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in WIDE
        and value.layout is torch.strided
        and value.numel() > 0
    )


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(WIDE[value.dtype]) if value.dtype in WIDE else value
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _makes_values(function: Callable[..., Any]) -> bool:
    """True if an operation returns new values that depend on its arguments alone.

    One that returns a view, writes into its arguments or draws random numbers does not.
    """
    schema = getattr(function, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
        return False
    return all(returned.alias_info is None for returned in schema.returns)


# What measured gradients are compared with: the reference, and its rounding.


class Expected:
    """A reference, the descriptions of its gradients, and its rounding.

    ``order``: that in which the steps read the examples, if it is not that of the batch. ``data``:
    for every rank, digests of the examples that it must be given; None for a batch of the
    catalogue, which no process can build differently.
    """

    def __init__(
        self, reference: Reference, data: DataByRank | None = None, order: tuple[int, ...] = ()
    ) -> None:
        self.reference = reference
        self.data = data
        self._order = order
        self._rounding: dict[torch.dtype | None, Rounding] = {}
        self._of_more_runs: dict[torch.dtype | None, Rounding] = {}
        self.start = ""
        """A digest of the weights of a large model, as it was built first; "" of any other."""

    def batches(self) -> list[Any]:
        """The big batches, built once more.

        Raises BadCase if they are others than those of the reference.
        """
        case, steps = self.reference.case, self.reference.steps
        whole, sizes = build_whole_batch(case, steps)
        if self.data is not None:
            again = self.data.of_batch(case, whole, sizes)
            leaf = next(filter(None, map(differing_leaf, self.data.by_rank, again.by_rank)), None)
            if leaf is not None:
                right = f"a function that makes the same batch at each call; {leaf} was another "
                right += "one at the second call (an iterator that goes on, or random numbers of "
                right += "a generator that no seed is set in)"
                raise BadCase("batch", name_of(case.batch), right)
        if self._order:
            whole = take(whole, self._order, case.batch_dims)
        return batches_of_steps(case, whole, sizes)

    @cached_property
    def described(self) -> dict[GradientKey, Description | None]:
        """The shape, dtype and layout that every measured gradient should have."""
        dtypes = self.reference.dtypes
        return {
            key: description and replace(description, dtype=dtypes[key[1]])
            for key, description in describe(self.reference.expected).items()
        }

    @property
    def rounding(self) -> Rounding:
        """The rounding without autocast."""
        return self.rounding_under(None)

    def rounding_under(self, autocast: torch.dtype | None) -> Rounding:
        """Measured on first use, because gradients within the least limit pass without it.

        ``autocast``: the dtype of the autocast region in which the forward pass runs, if any.
        """
        if autocast not in self._rounding:
            self._rounding[autocast] = self.measure(autocast)
        return self._rounding[autocast]

    def noise_of_one_run(self, autocast: torch.dtype | None) -> dict[GradientKey, Noise]:
        """The least that rounding does, of one run of several: limits that it gives are certain."""
        self.start = ""  # from here on, models that are built later count as well
        return noise_of_one_run(self.reference, self.batches(), autocast)

    def rounding_of_more_runs(self, autocast: torch.dtype | None = None) -> Rounding:
        """Measured where the comparison fails by so little that rounding may be the reason."""
        if autocast not in self._of_more_runs:
            self._of_more_runs[autocast] = self.measure(autocast, more=True)
        return self._of_more_runs[autocast]

    def measure(self, autocast: torch.dtype | None, more: bool = False) -> Rounding:
        """Measure the rounding of a few runs; or of further ones too."""
        self.start = ""
        if not more:
            return measure_rounding(self.reference, self.batches(), autocast)
        return measure_more(self.reference, self.rounding_under(autocast), self.batches(), autocast)
