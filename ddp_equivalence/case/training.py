"""Training over several steps: optimizers, clipping, and what of it is compared."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FrameType
from typing import Any, Literal, Protocol
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.errors import BadCase, is_number, it_raised

# How the big batch is trained where several steps, or updates of the weights, are compared.


class Stepping(Protocol):
    """An optimizer or a scheduler of learning rates: all that is asked of it is its next step."""

    def step(self) -> Any: ...


MakeOptimizer = Callable[[Any], Stepping | Sequence[Stepping]]
"""A user's function of the model's parameters, or of the model if its argument is called so. It
returns what steps after every backward pass: an optimizer, or several optimizers and schedulers in
the order in which they step."""

Clip = float | Callable[[list[nn.Parameter]], object]
"""The largest norm of all gradients together, or a user's function of the parameters."""

OwnReference = Callable[..., Any]
"""A user's function (model, batch) -> None, which trains one step in one process; or a function
(model) -> such a function of the batch, which keeps an optimizer through all steps."""

OPTIMIZER = (
    "a function of the parameters (or of the model, if its argument is called model) that returns "
    "an optimizer, or a list of optimizers and schedulers"
)
REFERENCE = (
    "a function (model, batch) that trains one step in one process, or a function (model) that "
    "returns such a function of the batch"
)


@dataclass(frozen=True)
class Training:
    """The training of the reference after each backward pass; plain SGD if nothing else is given.

    ``lr``: the learning rate of plain SGD. ``optimizer``: what steps instead. ``clip``: what
    happens to the gradients before. ``reference``: does whole steps by itself, with a loss and an
    optimizer of its own.
    """

    lr: float = 0.1
    optimizer: MakeOptimizer | None = None
    clip: Clip | None = None
    reference: OwnReference | None = None

    @property
    def is_plain_sgd(self) -> bool:
        """True if a step moves each weight by ``-lr`` times its gradient."""
        return self.optimizer is None and self.clip is None and self.reference is None

    @property
    def is_of_the_user(self) -> bool:
        """True if the reference is a user's own function, which nothing can be predicted from."""
        return self.reference is not None

    def steppers(self, model: nn.Module) -> list[Stepping]:
        """The optimizers that step after every backward pass of this model; none with plain SGD.

        Raises BadCase if the user's function raises or returns something else.
        """
        if self.optimizer is None:
            return []
        argument: object = model if _takes_model(self.optimizer) else list(model.parameters())
        try:
            made = self.optimizer(argument)
        except Exception as error:
            right = f"{OPTIMIZER}; {it_raised(error)}"
            raise BadCase("optimizer", name_of(self.optimizer), right) from error
        steppers = list(made) if isinstance(made, Sequence) else [made]
        wrong = [one for one in steppers if not callable(getattr(one, "step", None))]
        if wrong or not any(isinstance(one, torch.optim.Optimizer) for one in steppers):
            given = type(wrong[0] if wrong else made).__name__
            raise BadCase("optimizer", name_of(self.optimizer), f"{OPTIMIZER}; not {given}")
        return steppers

    def clip_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients as the user asks for.

        Raises BadCase if the user's function raises.
        """
        if self.clip is None:
            return
        with_gradient = [one for one in parameters if one.grad is not None]
        if not callable(self.clip):
            torch.nn.utils.clip_grad_norm_(with_gradient, self.clip)
            return
        try:
            self.clip(with_gradient)
        except Exception as error:
            right = f"a number above 0, or a function of the parameters; {it_raised(error)}"
            raise BadCase("clip", name_of(self.clip), right) from error


def begin_reference(reference: OwnReference, model: nn.Module) -> Callable[[Any], Any]:
    """The user's step in one process, as a function of the batch."""
    if positional_arguments(reference) == 1:
        step: Any = reference(model)
        if not callable(step):
            right = f"{REFERENCE}; it returned {type(step).__name__}"
            raise BadCase("reference", name_of(reference), right)
        return lambda batch: step(batch)
    return lambda batch: reference(model, batch)


def check_training(training: Training, compare: str) -> None:
    """Raises BadCase for an optimizer, a clip or a reference that cannot be right."""
    for name in ("optimizer", "reference"):
        value = getattr(training, name)
        right = OPTIMIZER if name == "optimizer" else REFERENCE
        if value is not None and not callable(value):
            raise BadCase(name, value, right)
    if isinstance(training.optimizer, type) and issubclass(
        training.optimizer, torch.optim.Optimizer
    ):
        made = training.optimizer.__name__
        right = f"a function that makes it with its settings: lambda params: {made}(params, lr=...)"
        raise BadCase("optimizer", made, right)
    clip = training.clip
    if clip is not None and not callable(clip) and not (is_number(clip) and clip > 0):
        raise BadCase("clip", clip, "a number above 0, or a function of the parameters")
    if training.reference is not None and positional_arguments(training.reference) not in (1, 2):
        raise BadCase("reference", name_of(training.reference), REFERENCE)
    if training.reference is not None and (training.optimizer or training.clip is not None):
        given = "optimizer" if training.optimizer else "clip"
        right = "left out beside reference=, which steps with an optimizer of its own"
        raise BadCase(given, name_of(getattr(training, given)), right)
    if compare != "update" and not training.is_plain_sgd:
        names = [name for name in ("optimizer", "clip", "reference") if getattr(training, name)]
        right = f'"update": with {names[0]}= the step trains, and leaves weights to compare'
        raise BadCase("compare", compare, right)


def positional_arguments(function: Callable[..., Any]) -> int | None:
    """How many arguments a function needs; None if that is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        one.kind in positional and one.default is inspect.Parameter.empty for one in parameters
    )


def _takes_model(make: MakeOptimizer) -> bool:
    try:
        names = list(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return False
    return names[:1] == ["model"]


# Several training steps in one check: how the batch is divided, and what is compared.

Compare = Literal["gradients", "update"]
"""Compared are the gradients of every step, or how far all steps together move the weights."""

Steps = int | tuple[int, ...]
"""The number of big batches, all of one size, that the batch is divided into; or the number of
examples in each of them."""

GradientKey = tuple[int, str]
"""Step, counted from 0, and parameter name. Updates are compared once, so their step is 0."""


def update_of(weight: Tensor, before: Tensor | None, frozen: bool) -> Tensor | None:
    """The weight minus the one before; None for a parameter that is frozen and has not moved.

    A frozen parameter may have moved: if it was frozen after its training, or if it should not have
    been trained.
    """
    if before is None:
        return weight
    return None if frozen and bool((weight == before).all()) else weight - before


Settings = Mapping[str, object]
"""With what an optimizer steps a parameter: its class, learning rate, weight decay, and so on."""


OF_NO_MATTER = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
"""Of a group of parameters: what does not decide how far they move."""


def settings_of(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Settings]:
    """Parameter name -> the settings with which this optimizer steps it."""
    names = {id(one): name for name, one in parameters.items()}
    found: dict[str, Settings] = {}
    for group in optimizer.param_groups:
        values = {key: _plain(value) for key, value in group.items() if key not in OF_NO_MATTER}
        settings = {"optimizer": type(optimizer).__name__} | {
            key: value for key, value in values.items() if value is not None
        }
        own = (names[id(one)] for one in group["params"] if id(one) in names)
        found.update(dict.fromkeys(own, settings))
    return found


def _plain(value: object) -> object:
    """The number, text or tuple of numbers; None for anything else."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, tuple | list):
        return tuple(value) if all(isinstance(one, int | float) for one in value) else None
    return value if isinstance(value, bool | int | float | str) else None


def step_count(steps: Steps) -> int:
    """The number of big batches, which is the number of training steps."""
    return steps if isinstance(steps, int) else len(steps)


# Notices every step of every optimizer, through torch's own hooks, also inside trainers.
#
# Source: ``torch.optim.optimizer.register_optimizer_step_pre_hook`` and ``..._post_hook``.

Arguments = tuple[Any, ...]
Named = dict[str, Any]
Changed = tuple[Arguments, Named]


class StepCount:
    """``seen``: how often an optimizer has stepped. A step inside another one does not count.

    A closure that is given to ``optimizer.step`` goes backward inside the step, as Lightning's do.
    ``before`` is then called when the closure has run once, and so has left its gradients. A step
    that raises has no end; this is noticed when the next one begins.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._inside = 0
        self._outermost: FrameType | None = None
        self._waits_for_closure = False
        self._last_hook: RemovableHandle | None = None
        self._is_about_to_step = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count inside the block."""

        def before(optimizer: Optimizer, arguments: Arguments, named: Named) -> Changed | None:
            caller = sys._getframe(1)
            if self._inside and not _runs(self._outermost, caller):
                self._inside, self._waits_for_closure = 0, False
                self._remove_last_hook()
            self._inside += 1
            if self._inside != 1:
                return None
            self._outermost = caller
            self.seen += 1
            if _closure(arguments, named) is None:
                # Hooks of the optimizer's own run after this one, and may reduce gradients.
                self._is_about_to_step = True
                self._last_hook = optimizer.register_step_pre_hook(begins)
                return None
            return self._with_noticed_closure(optimizer, arguments, named)

        def begins(optimizer: Optimizer, arguments: Arguments, named: Named) -> None:
            if self._is_about_to_step:  # and is no step of the same optimizer inside its own
                self._is_about_to_step = False
                self.before(optimizer)

        def after(optimizer: Optimizer, arguments: Arguments, named: Named) -> None:
            self._inside -= 1
            if self._inside == 0:
                self._outermost = None
                self._remove_last_hook()
                self._has_gradients(optimizer)
                self.after()

        handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._remove_last_hook()
            self._outermost = None  # it keeps what the step holds

    def _remove_last_hook(self) -> None:
        """An optimizer has stepped, or has raised while it did."""
        if self._last_hook is not None:
            self._last_hook.remove()
            self._last_hook = None

    def _with_noticed_closure(
        self, optimizer: Optimizer, arguments: Arguments, named: Named
    ) -> Changed:
        """The arguments of a step with a closure that tells when it has run for the first time."""
        closure = _closure(arguments, named)
        self._waits_for_closure = True

        def noticed() -> Any:
            result = closure()
            self._has_gradients(optimizer)
            return result

        if "closure" in named:
            return arguments, {**named, "closure": noticed}
        return (arguments[0], noticed, *arguments[2:]), named

    def _has_gradients(self, optimizer: Optimizer) -> None:
        """The closure has run, or the step ends without it."""
        if self._waits_for_closure:
            self._waits_for_closure = False
            self.before(optimizer)

    def before(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, and has its gradients."""

    def after(self) -> None:
        """An optimizer has stepped."""


@dataclass(frozen=True)
class AtSteps:
    """The values that are taken at each step: the gradients, or else the weights after it.

    ``after_clipping``: the gradients are those that the optimizer steps with. Otherwise they are
    those from before one call of torch that clips them all, if nothing changes them after it.
    """

    gradients: bool = False
    after_clipping: bool = False


Whole = Callable[[dict[str, Tensor | None], Mapping[int, Tensor]], Mapping[str, Tensor | None]]


class StepRecord(StepCount):
    """The values of parameters at every step: their gradients before it, or their weights after it.

    Optimizers that step one after the other, without a backward pass in between, make one step.
    ``parameters``: the parameters by name, asked for at each step. ``gradients``, ``weights``:
    copies, by step and name. Of the gradients, those that the optimizers of the step were given.
    ``clips``: the calls of torch that clipped gradients. ``steps_copies``: an optimizer stepped
    none of the model's own parameters, but copies such as one flat tensor.
    ``changed_after_clipping``: clipped gradients were changed before a step. ``settings``: with
    which the optimizers step each parameter. ``whole`` makes gradients whole where they are
    sharded; it gets those from before they were clipped, by their id. ``weights`` reads the
    weights so.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        at_steps: AtSteps,
        ended: Callable[[int], None] = lambda number: None,
        whole: Whole = lambda found, _: found,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.gradients: dict[GradientKey, Tensor | None] = {}
        self.weights: dict[GradientKey, Tensor] = {}
        self.count = 0
        self._parameters = parameters
        self._at_steps = at_steps
        self._ended = ended
        self._whole = whole
        self._weights = weights or self._copied_weights
        self._went_backward = True
        self._clipping = Clipping()
        self.clips = self._clipping.calls
        self.steps_copies = False
        self.changed_after_clipping = False
        self.settings: dict[GradientKey, Settings] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record inside the block."""
        backward = torch.autograd.backward

        def noticed(*arguments: Any, **named: Any) -> Any:
            self._went_backward = True
            return backward(*arguments, **named)

        noticing = patch.object(torch.autograd, "backward", noticed)
        with noticing, self._clipping.watched(), super().watched():
            yield

    def before(self, optimizer: Optimizer) -> None:
        if self._went_backward:
            self._went_backward = False
            self.count += 1
        parameters = self._parameters()
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        its_own = {id(one) for one in stepped}
        owned = {name: one for name, one in parameters.items() if id(one) in its_own}
        # FSDP1 puts parameters into flat ones, and an optimizer is given these.
        flat = [one for one in stepped if getattr(one, "_fsdp_flattened", False)]
        self.steps_copies |= not (owned or flat)
        own = settings_of(optimizer, parameters)
        self.settings |= {(self.count - 1, name): one for name, one in own.items()}
        if not self._at_steps.gradients:
            return
        named = owned or parameters
        before_clipping: Mapping[int, Tensor] = {}
        if not self._at_steps.after_clipping:
            before_clipping = self._clipping.before(one.grad for one in (*named.values(), *flat))
            self.changed_after_clipping |= self._clipping.has_clipped and not before_clipping
        found = {
            name: _copy(before_clipping.get(id(one.grad), one.grad)) for name, one in named.items()
        }
        whole = self._whole(found, before_clipping)
        self.gradients |= {(self.count - 1, name): one for name, one in whole.items()}

    def after(self) -> None:
        self._went_backward = False  # a closure may have gone backward more than once
        if not self._at_steps.gradients:
            self.weights |= {(self.count - 1, name): one for name, one in self._weights().items()}
        self._clipping.forget()
        self._ended(self.count)

    def _copied_weights(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self._parameters().items()}


def _runs(frame: FrameType | None, inside: FrameType | None) -> bool:
    """True if this frame is one of those that led to ``inside``."""
    while inside is not None and inside is not frame:
        inside = inside.f_back
    return inside is not None


def _closure(arguments: Arguments, named: Named) -> Any:
    """The closure that ``optimizer.step`` was called with, after the optimizer itself."""
    return named.get("closure", arguments[1] if len(arguments) > 1 else None)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


# Keeps gradients as they were before torch clipped them.
#
# Whoever clips wants other gradients than those of the loss. So the gradients are compared as
# they were before: clipped gradients would hide a wrong factor, and would all look wrong beside
# those of the loss.

FUNCTIONS = (clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_)
"""The functions of torch that write to gradients to clip them; ``clip_grad_norm_`` calls the first.

Both are wrapped in ``no_grad``. Source: torch 2.11 and 2.13, torch/nn/utils/clip_grad.py.
"""


@dataclass(frozen=True)
class ClipCall:
    """One call that clips gradients. ``most``: the largest norm, or with ``by_value`` the largest
    element; None if it is no number.
    """

    by_value: bool
    most: float | None

    def __str__(self) -> str:
        what = "each element" if self.by_value else "their norm"
        return what if self.most is None else f"{what} to {self.most:g}"

    def again(self, parameters: list[nn.Parameter]) -> None:
        """Clip the gradients of these parameters as the call did."""
        assert self.most is not None
        clip = clip_grad.clip_grad_value_ if self.by_value else clip_grad.clip_grad_norm_
        clip(parameters, self.most)


class Clipping:
    """``calls``: all calls inside ``watched`` that clipped gradients. ``last_count``: the number of
    gradients that the last one clipped.
    """

    def __init__(self) -> None:
        self.calls: list[ClipCall] = []
        self.last_count = 0
        self._clipped: list[dict[int, _Clipped]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the gradients inside the block, whenever torch clips some."""
        inner = [_inner_function(function) for function in FUNCTIONS]
        before = [cell.cell_contents for cell in inner]
        for cell, clip in zip(inner, before, strict=True):
            cell.cell_contents = partial(self._clip, clip)
        try:
            yield
        finally:
            for cell, clip in zip(inner, before, strict=True):
                cell.cell_contents = clip

    @property
    def has_clipped(self) -> bool:
        """True if calls since the last step of an optimizer have clipped gradients."""
        return bool(self._clipped)

    def forget(self) -> None:
        """The calls that clipped until now no longer count: an optimizer has used the gradients."""
        self._clipped.clear()

    def before(self, gradients: Iterable[Tensor | None]) -> Mapping[int, Tensor]:
        """``id`` of a gradient -> the same before it was clipped.

        Empty unless one call alone has clipped all of ``gradients``, and nothing was written to
        them since: only then did it clip what an optimizer gets.
        """
        if len(self._clipped) != 1:
            return {}
        (clipped,) = self._clipped
        found = {}
        for one in gradients:
            if one is None:
                continue
            kept = clipped.get(id(one))
            if kept is None or not kept.is_as_it_was_left:
                return {}
            found[id(one)] = kept.before
        return found

    def _clip(self, clip: Callable[..., Any], parameters: Any, *rest: Any, **named: Any) -> Any:
        """Clip as torch does, and keep what the gradients were before."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        before = [(one, None if one.grad is None else one.grad.detach().clone()) for one in given]
        result = clip(given, *rest, **named)
        by_value = clip.__name__ == clip_grad.clip_grad_value_.__name__
        most = rest[0] if rest else named.get("clip_value" if by_value else "max_norm")
        self.calls.append(ClipCall(by_value, _number(most)))
        clipped = {
            id(one.grad): _Clipped(one.grad, kept)
            for one, kept in before
            if one.grad is not None and kept is not None
        }
        self._clipped.append(clipped)
        self.last_count = len(clipped)
        return result


def _inner_function(wrapped: Any) -> CellType:
    """Where a function of torch keeps the one that it wraps. Whoever has imported the function, by
    whatever name, calls what stands there.
    """
    cells: tuple[CellType, ...] = wrapped.__closure__
    return next(one for one in cells if callable(one.cell_contents))


class _Clipped:
    """A gradient that was clipped just now, and what it was ``before``."""

    def __init__(self, gradient: Tensor, before: Tensor) -> None:
        self.before = before
        self._gradient = gradient  # kept, so that no other tensor gets its id
        self._left = gradient._version, _norm(gradient)

    @property
    def is_as_it_was_left(self) -> bool:
        """True if nothing was written to the gradient since. GradScaler.unscale_ counts no new
        version, but changes the norm.
        """
        return self._left == (self._gradient._version, _norm(self._gradient))


def _norm(gradient: Tensor) -> float:
    """The norm of what this process holds of a gradient; NaN would not be equal to itself."""
    local: Tensor = getattr(gradient, "_local_tensor", gradient).detach()
    values = local.coalesce().values() if local.is_sparse else local
    return float(torch.nan_to_num(values).norm())


def _number(most: Any) -> float | None:
    try:
        return float(most)
    except (TypeError, ValueError, RuntimeError):
        return None
