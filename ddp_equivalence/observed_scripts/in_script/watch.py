"""Collects what is known of a process of an observed script, from one step to the next."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import get_worker_info

from ddp_equivalence.faults.plant import PlantedFault
from ddp_equivalence.measurement.call_watch import Lines
from ddp_equivalence.measurement.calls import lines_of
from ddp_equivalence.observed_scripts.in_script.around import after, around
from ddp_equivalence.observed_scripts.in_script.cuda_on_cpu import is_batch_norm
from ddp_equivalence.observed_scripts.in_script.draws import follow_device, generator_states
from ddp_equivalence.observed_scripts.in_script.kept_tensors import (
    ModuleNames,
    held_in_python,
    kept,
    mark_of,
    named_tensors,
    place_of_caller,
    whole,
)
from ddp_equivalence.observed_scripts.in_script.loaders import Loaders, watch_loaders
from ddp_equivalence.observed_scripts.in_script.script_changes import (
    batch_in_float64,
    let_torch_draw,
    to_float64,
)
from ddp_equivalence.observed_scripts.record import (
    Event,
    GeneratorStates,
    SeenCall,
    SeenClip,
    Step,
    same_states,
    write_whole,
)
from ddp_equivalence.observed_scripts.rows import TOP_OF_CALL, rows_of
from ddp_equivalence.ranks.users_line import counts_as_torch


class Watch:
    """Follows the script. ``Recorder`` and ``Replayer`` say what happens with what is seen.

    ``loss_scale``: the last one by which a loss was multiplied; ``gradients_are_scaled``: they
    still are. ``steps_seen``: the calls of an optimizer's step. ``wrapped``: the DDP wrappers that
    were made, with the lines that made them. ``no_sync_at``: the last lines that called the no_sync
    of one. ``planted``: the fault that is planted here. ``loaders``: those of this process.
    """

    float64 = False

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.now = Step()
        self.loss_scale, self.gradients_are_scaled = 1.0, False
        self.steps_seen = 0
        self.planted: PlantedFault | None = None
        self.wrapped: list[tuple[Any, Lines]] = []
        self.no_sync_at: Lines | None = None
        self._of_this_backward: dict[str, Tensor] = {}
        self._last_states: GeneratorStates | None = None
        self.loaders = Loaders()
        self._scale_of_backward = self._scale_of_clip = 1.0
        self._read_inside: list[dict[int, None]] = []

    def is_on(self) -> bool:
        """False in a process that loads data."""
        return get_worker_info() is None

    @property
    def keeps_tensors(self) -> bool:
        """False in a step whose weights and gradients nobody will ask for."""
        return True

    # --- what Recorder and Replayer do

    def goes_on(self) -> None:
        """The script goes on after an optimizer's step: what that step was is complete."""

    def enters(self, name: str, module: nn.Module) -> None:
        """A module is called for the first time since the last step."""

    def fed(self, name: str, arguments: Any, named: Any) -> tuple[Any, Any]:
        """A module is called that is trained: the arguments to call it with."""
        return arguments, named

    def not_trained(self, arguments: Any, named: Any) -> None:
        """A module is called without being trained, such as in an evaluation."""

    def draws_like_the_record(self, event: Event) -> None:
        """Something happens before which the state of the random generator matters."""

    def batches_of(self, loader: Any, iterator: Any) -> Iterator[Any]:
        """The batches that the loader is to yield."""
        raise NotImplementedError

    def length_of(self, loader: Any, batches: int) -> int:
        """How many batches the loader is said to have. ``batches``: those that it has."""
        return batches

    def given(self, loader: int) -> None:
        """The script gets the next batch of this loader, which may have been read before."""

    def loader_begins(self) -> AbstractContextManager[None]:
        """Around the start of an iteration, in which torch draws a seed for the loader."""
        return nullcontext()

    def ends_step(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        raise NotImplementedError

    def step_was_skipped(self) -> None:
        """A loss scaler has found gradients that are not finite, and left the step out."""
        self.now = Step()

    # --- events

    def handed_on(self, iterator: Any) -> Iterator[Any]:
        """The batches of a loader that hands on those of a loader inside it."""
        inside: dict[int, None] = {}
        while True:
            self._read_inside.append(inside)
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._read_inside.pop()
            for loader in inside:
                self.given(loader)
            yield batch

    def was_read(self, loader: int) -> None:
        """A loader has read a batch."""
        if self._read_inside:
            self._read_inside[-1][loader] = None
        else:
            self.given(loader)

    def write(self, path: Path, **more: Any) -> None:
        """Write what the step is. ``more``: other values of its fields."""
        calls = [replace(call, rows=call.rows.changed(whole)) for call in self.now.calls]
        write_whole(path, replace(self.now, calls=calls, **more))

    def before_call(self, module: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
        """The script calls a module, outside of all others."""
        if not any(True for _ in named_tensors(module)):
            return arguments, named
        if self.float64:
            to_float64(module)
            arguments, named = batch_in_float64((arguments, named))
        self.goes_on()
        name = self.names.of(module)
        self._hook_parameters(name, module)
        if not self.now.entered and self.keeps_tensors:
            self.now.in_python = held_in_python(module)
        if name not in self.now.entered:
            self.now.entered.add(name)
            self.enters(name, module)
        trained = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        if trained:
            arguments, named = self.fed(name, arguments, named)
            rows = rows_of((arguments, named), TOP_OF_CALL)
            self.now.calls.append(SeenCall(name, len(self.now.losses), place_of_caller(), rows))
            self.now.batch_norm |= any(map(is_batch_norm, module.modules()))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
                    self.now.autocast.add(dtype)
        else:
            self.not_trained(arguments, named)
        self.note_draws()
        self.draws_like_the_record(self._event("call" if trained else "other call"))
        return arguments, named

    def after_call(self, result: Any) -> None:
        """The call has returned this."""
        self.note_draws()
        if self.keeps_tensors and len(self.now.results) < len(self.now.calls):
            self.now.results.append(mark_of(result))

    def _event(self, kind: str) -> Event:
        """The next event of a kind since the last backward pass."""
        passes = len(self.now.losses)
        number = self.now.events[kind, passes]
        self.now.events[kind, passes] += 1
        return Event(kind, passes, number)

    def note_draws(self, by_the_script: bool = True) -> None:
        """Note whether random numbers were drawn since this was last called.

        ``by_the_script``: False if a loader may have drawn them.
        """
        before, self._last_states = self._last_states, generator_states()
        if before is not None and by_the_script:  # initial weights were drawn before that
            self.now.draws |= not same_states(before, self._last_states)

    def before_backward(self, roots: Sequence[Tensor]) -> None:
        """A backward pass begins."""
        self.goes_on()
        self.note_draws()
        self._scale_of_backward = self.loss_scale if self.gradients_are_scaled else 1.0
        values = [float(root.detach()) for root in roots if root.numel() == 1]
        loss = sum(values) / self._scale_of_backward if values else math.nan
        self.now.losses.append(loss)
        self.now.scales.append(self._scale_of_backward)
        self.now.before_clip = None  # what was clipped until now is a part of the gradient
        self.now.backward_at.append(place_of_caller())
        self._of_this_backward = {}

    def after_backward(self) -> None:
        """A backward pass has ended."""
        own, self._of_this_backward = self._of_this_backward, {}
        if self._scale_of_backward != 1.0:
            own = {name: gradient.div_(self._scale_of_backward) for name, gradient in own.items()}
        self.now.own_of_each.append(own)
        for name, gradient in own.items():
            before = self.now.own.get(name)
            self.now.own[name] = gradient if before is None else kept(before + gradient)

    def before_clip(self) -> None:
        """Gradients are about to be clipped."""
        scale = self.loss_scale if self.gradients_are_scaled else 1.0
        self._scale_of_clip = scale = scale_that_is_left(scale, self.names, self.now)
        if self.now.before_clip is None and self.keeps_tensors:
            self.now.before_clip = {
                name: None if p.grad is None else whole(p.grad, divided_by=scale)
                for name, p in self.names.live_parameters()
                if p.requires_grad
            }

    def after_clip(self, limit: float, result: Any) -> None:
        """Gradients have been clipped. ``result``: their norm before that, if one was returned."""
        norm = math.nan
        if isinstance(result, Tensor) and result.numel() == 1:
            norm = float(whole(result))
        scale, changed = self._scale_of_clip, norm > limit
        self.now.clips.append(SeenClip(limit, norm, scale, changed, place_of_caller()))

    def optimizer_steps(self, optimizer: Any) -> None:
        """An optimizer is about to step, with the gradients that it is given now."""
        self.steps_seen += 1
        if not self.now.losses and not self.now.optimizers:
            return  # nothing was computed since the last step
        # Fused optimizers divide by the loss scale themselves.
        inside = getattr(optimizer, "grad_scale", None)
        scale = float(inside) if isinstance(inside, Tensor) else 1.0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.names.of_parameter(parameter)
                if name is not None and not parameter.requires_grad:
                    self.now.frozen.add(name)
                if name is None:
                    self.now.unnamed += parameter.requires_grad
                elif parameter.grad is None:
                    self.now.held[name] = None
                elif self.keeps_tensors:
                    self.now.held[name] = whole(parameter.grad, divided_by=scale)
        self.now.optimizers.append(type(optimizer).__name__)
        self.now.stepped_at = place_of_caller()
        self.ends_step(optimizer)

    def _hook_parameters(self, name: str, module: nn.Module) -> None:
        new = self.names.learn_parameters(name)
        if new:
            let_torch_draw(module)
            follow_device(new[0][1].device)
        for full, parameter in new:
            if parameter.requires_grad and not hasattr(parameter, "full_tensor"):
                parameter.register_hook(lambda gradient, full=full: self._own(full, gradient))

    def _own(self, name: str, gradient: Tensor) -> None:
        if not self.keeps_tensors:
            return
        value = whole(gradient)
        before = self._of_this_backward.get(name)
        self._of_this_backward[name] = value if before is None else kept(before + value)


# Replaces functions of torch so that a watch is told of their calls. What the script computes stays
# as it is, and frames of the replacements count as torch's own.

_inside = threading.local()


def install(watch: Watch) -> None:
    """Let ``watch`` be told of everything from now on."""

    def wrapped(ddp: Any) -> None:
        watch.wrapped.append((ddp, lines_of(sys._getframe())))

    def not_synchronised(ddp: Any) -> None:
        watch.no_sync_at = lines_of(sys._getframe())

    after(DistributedDataParallel, "__init__", wrapped)
    after(DistributedDataParallel, "no_sync", not_synchronised)
    _watch_modules(watch)
    watch_loaders(watch)
    _watch_backward(watch)
    _watch_optimizers(watch)
    _watch_clipping(watch)
    _watch_loss_scales(watch)


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
    def backward(call: Any, *arguments: Any, **named: Any) -> Any:
        if getattr(_inside, "backward", False) or not watch.is_on():
            return call(*arguments, **named)
        tensors = arguments[0] if arguments else named["tensors"]
        watch.before_backward([tensors] if isinstance(tensors, Tensor) else list(tensors))
        _inside.backward = True
        try:
            return call(*arguments, **named)
        finally:
            _inside.backward = False
            watch.after_backward()

    around(torch.autograd, "backward", backward)


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
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        signature = inspect.signature(getattr(clip_grad, name))

        def clipped(
            clip: Any, *arguments: Any, signature: inspect.Signature = signature, **named: Any
        ) -> Any:
            if not watch.is_on():
                return clip(*arguments, **named)
            bound = signature.bind(*arguments, **named)
            first, second = list(signature.parameters)[:2]
            if not isinstance(bound.arguments[first], Tensor):
                bound.arguments[first] = list(bound.arguments[first])
            watch.before_clip()
            result = clip(*bound.args, **bound.kwargs)
            watch.after_clip(float(bound.arguments[second]), result)
            return result

        around(clip_grad, name, clipped)
        setattr(torch.nn.utils, name, getattr(clip_grad, name))


def _watch_loss_scales(watch: Watch) -> None:
    def scaled(scaler: Any) -> None:
        if watch.is_on() and scaler.is_enabled():
            watch.loss_scale, watch.gradients_are_scaled = float(scaler.get_scale()), True

    def unscaled(scaler: Any) -> None:
        watch.gradients_are_scaled &= not scaler.is_enabled()

    def stepped(step: Any, scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        before = watch.steps_seen
        result = step(scaler, optimizer, *arguments, **named)
        if watch.is_on() and scaler.is_enabled() and watch.steps_seen == before:
            watch.step_was_skipped()
        return result

    after(torch.amp.GradScaler, "scale", scaled)
    after(torch.amp.GradScaler, "unscale_", unscaled)
    around(torch.amp.GradScaler, "step", stepped)


# Which loss scale gradients still have.

LARGE_SCALE = 1024.0
"""No reduction makes gradients so much larger or smaller than the ranks' own ones."""


def scale_that_is_left(scale: float, names: ModuleNames, now: Step) -> float:
    """The loss scale that the gradients still have, which was ``scale``. A script may have divided
    by it by hand: then they are not as much larger as the scale is than what was computed.
    """
    if scale < LARGE_SCALE:
        return scale
    squares = {"held": 0.0, "own": 0.0}
    for name, parameter in names.live_parameters():
        own = now.own.get(name)
        if parameter.grad is not None and own is not None:
            squares["held"] += float(parameter.grad.detach().double().square().sum())
            squares["own"] += float(own.double().square().sum())
    divided = squares["own"] > 0 and squares["held"] < scale * squares["own"]
    return 1.0 if divided else scale


def end_process() -> NoReturn:
    """End this process, which has nothing more to do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
