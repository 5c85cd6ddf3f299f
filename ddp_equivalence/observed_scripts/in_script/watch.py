"""Collects what is known of a process of an observed script, from one step to the next."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from ddp_equivalence.faults.plant import PlantedFault
from ddp_equivalence.measurement.call_watch import Lines
from ddp_equivalence.observed_scripts.in_script.cuda_on_cpu import is_batch_norm
from ddp_equivalence.observed_scripts.in_script.draws import follow_device, generator_state
from ddp_equivalence.observed_scripts.in_script.hooks import (
    batch_in_float64,
    let_torch_draw,
    to_float64,
)
from ddp_equivalence.observed_scripts.in_script.kept_tensors import (
    ModuleNames,
    held_in_python,
    kept,
    mark_of,
    named_tensors,
    place_of_caller,
    whole,
)
from ddp_equivalence.observed_scripts.in_script.loaders import Loaders
from ddp_equivalence.observed_scripts.record import (
    Event,
    SeenCall,
    SeenClip,
    Step,
    write_whole,
)
from ddp_equivalence.observed_scripts.rows import TOP_OF_CALL, rows_of


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
        self._last_state: Tensor | None = None
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
        """The script calls a module."""
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
        before, self._last_state = self._last_state, generator_state()
        if before is not None and by_the_script:  # initial weights were drawn before that
            self.now.draws |= not torch.equal(before, self._last_state)

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
