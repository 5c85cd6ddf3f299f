"""Replaces a few functions of torch in the process of an observed script, and tells a ``Watch``.

What the script computes stays as it is. Frames of the replacements count as torch's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_equivalence.measurement.code_lines import lines_of
from ddp_equivalence.measurement.further_calls import Lines
from ddp_equivalence.observed_scripts.in_script.loader_hooks import watch_loaders
from ddp_equivalence.ranks.torch_frames import counts_as_torch

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import Watch

_inside = threading.local()


@dataclass(frozen=True)
class Hooked:
    """A communication hook with which ``ddp`` reduces. ``lines``: registered it."""

    ddp: DistributedDataParallel
    state: object
    hook: Callable[..., Any]
    lines: Lines


def install(watch: Watch) -> None:
    """Let ``watch`` be told of everything from now on."""
    _watch_wrappers(watch)
    _watch_modules(watch)
    watch_loaders(watch)
    _watch_backward(watch)
    _watch_optimizers(watch)
    _watch_clipping(watch)
    _watch_loss_scales(watch)


def _watch_wrappers(watch: Watch) -> None:
    initialise = DistributedDataParallel.__init__

    @counts_as_torch
    def watched(self: Any, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        watch.wrapped.append((self, lines_of(sys._getframe(1))))

    DistributedDataParallel.__init__ = watched  # type: ignore[method-assign]
    no_sync = DistributedDataParallel.no_sync

    @counts_as_torch
    def unsynchronised(self: Any) -> Any:
        watch.no_sync_at = lines_of(sys._getframe(1))
        return no_sync(self)

    DistributedDataParallel.no_sync = unsynchronised  # type: ignore[method-assign]
    register = DistributedDataParallel.register_comm_hook

    @counts_as_torch
    @functools.wraps(register)
    def registered(self: Any, state: object, hook: Callable[..., Any]) -> Any:
        watch.hooked.append(Hooked(self, state, hook, lines_of(sys._getframe(1))))
        return register(self, state, hook)

    DistributedDataParallel.register_comm_hook = registered  # type: ignore[method-assign]


def _watch_modules(watch: Watch) -> None:
    call = nn.Module.__call__

    @counts_as_torch
    def watched(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or getattr(_inside, "module", False)
            or isinstance(self, torch.jit.ScriptModule)
            or not watch.is_on()
        ):
            return call(self, *arguments, **named)
        _inside.module = True
        by_all: Any = nn.Module.__call__
        try:
            arguments, named = watch.before_call(self, arguments, named)
            # A closer look that has begun just now has replaced it, and is told of this call too.
            now: Any = nn.Module.__call__
            result = (call if now is by_all else now)(self, *arguments, **named)
        finally:
            _inside.module = False
        watch.after_call(result)
        return result

    nn.Module.__call__ = watched  # type: ignore[method-assign]


def _watch_backward(watch: Watch) -> None:
    backward = torch.autograd.backward

    @counts_as_torch
    def watched(*arguments: Any, **named: Any) -> Any:
        if getattr(_inside, "backward", False) or not watch.is_on():
            return backward(*arguments, **named)
        tensors = arguments[0] if arguments else named["tensors"]
        watch.before_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
        _inside.backward = True
        try:
            return backward(*arguments, **named)
        finally:
            _inside.backward = False
            watch.after_backward()

    torch.autograd.backward = watched
    grad = torch.autograd.grad

    @counts_as_torch
    @functools.wraps(grad)
    def watched_grad(outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        is_watched = not torch.compiler.is_compiling() and watch.is_on()
        if not is_watched or not watch.before_grad(outputs, inputs):
            return grad(outputs, inputs, *arguments, **named)
        try:
            return grad(outputs, inputs, *arguments, **named)
        finally:
            watch.after_backward()

    torch.autograd.grad = watched_grad


def _watch_optimizers(watch: Watch) -> None:
    def before_step(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not watch.is_on() or isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return None  # accelerate's wrapper calls the optimizer inside
        closure = named.get("closure") or (arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            watch.optimizer_steps(optimizer)
            return None

        @functools.wraps(closure)
        def then_steps(*of_closure: Any, **named_of_closure: Any) -> Any:
            """Lightning goes forward and backward inside the optimizer's step."""
            result = closure(*of_closure, **named_of_closure)
            watch.optimizer_steps(optimizer)
            return result

        if "closure" in named:
            return arguments, {**named, "closure": then_steps}
        return (arguments[0], then_steps, *arguments[2:]), named

    register_optimizer_step_pre_hook(before_step)


def _watch_clipping(watch: Watch) -> None:
    from torch.nn.utils import clip_grad

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        watched = _watched_clip(getattr(clip_grad, name), watch)
        setattr(clip_grad, name, watched)
        setattr(torch.nn.utils, name, watched)


def _watched_clip(clip: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    signature = inspect.signature(clip)
    first, second = list(signature.parameters)[:2]

    @counts_as_torch
    @functools.wraps(clip)
    def watched(*arguments: Any, **named: Any) -> Any:
        if not watch.is_on():
            return clip(*arguments, **named)
        bound = signature.bind(*arguments, **named)
        if not isinstance(bound.arguments[first], Tensor):
            bound.arguments[first] = list(bound.arguments[first])
        watch.before_clip()
        result = clip(*bound.args, **bound.kwargs)
        watch.after_clip(float(bound.arguments[second]), result)
        return result

    return watched


def _watch_loss_scales(watch: Watch) -> None:
    scaler = torch.amp.GradScaler
    scale, unscale, step = scaler.scale, scaler.unscale_, scaler.step

    @counts_as_torch
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if watch.is_on() and self.is_enabled():
            watch.loss_scale = float(self.get_scale())
            watch.gradients_are_scaled = True
        return result

    @counts_as_torch
    def unscaled(self: Any, optimizer: Any) -> Any:
        result = unscale(self, optimizer)
        if self.is_enabled():
            watch.gradients_are_scaled = False
        return result

    @counts_as_torch
    def stepped(self: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        before = watch.steps_seen
        result = step(self, optimizer, *arguments, **named)
        if watch.is_on() and self.is_enabled() and watch.steps_seen == before:
            watch.step_was_skipped()
        return result

    scaler.scale, scaler.unscale_, scaler.step = scaled, unscaled, stepped  # type: ignore[method-assign]
