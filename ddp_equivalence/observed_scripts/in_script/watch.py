"""What is known of one process of an observed script, from one optimizer step to the next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.faults.plant import PlantedFault
from ddp_equivalence.measurement.further_calls import Lines
from ddp_equivalence.observed_scripts.in_script.caller import place_of_caller
from ddp_equivalence.observed_scripts.in_script.float64 import batch_in_float64, to_float64
from ddp_equivalence.observed_scripts.in_script.frozen_parameters import FrozenParameters
from ddp_equivalence.observed_scripts.in_script.generator_states import (
    follow_device,
    generator_state,
)
from ddp_equivalence.observed_scripts.in_script.held_in_python import held_in_python
from ddp_equivalence.observed_scripts.in_script.hooks import Hooked
from ddp_equivalence.observed_scripts.in_script.kept_tensors import kept, whole
from ddp_equivalence.observed_scripts.in_script.left_scale import scale_that_is_left
from ddp_equivalence.observed_scripts.in_script.loaders import Loaders
from ddp_equivalence.observed_scripts.in_script.marks import mark_of
from ddp_equivalence.observed_scripts.in_script.names import ModuleNames, named_tensors
from ddp_equivalence.observed_scripts.in_script.recurrent_layers import let_torch_draw
from ddp_equivalence.observed_scripts.in_script.step_in_progress import StepInProgress
from ddp_equivalence.observed_scripts.in_script.sync_batch_norm_on_cpu import is_batch_norm
from ddp_equivalence.observed_scripts.listed_rows import TOP_OF_CALL
from ddp_equivalence.observed_scripts.recorded_step import Event, SeenCall, SeenClip
from ddp_equivalence.observed_scripts.rows import rows_of
from ddp_equivalence.observed_scripts.time_first import with_rows_first


class Watch:
    """Follows the script. ``Recorder`` and ``Replayer`` say what happens with what is seen.

    ``loss_scale``: the last one by which a loss was multiplied; ``gradients_are_scaled``: they
    still are. ``steps_seen``: the calls of an optimizer's step. ``wrapped``: the DDP wrappers that
    were made, with the lines that made them. ``no_sync_at``: the last lines that called the no_sync
    of one. ``hooked``: the communication hooks of wrappers. ``frozen``: the lines that have frozen
    parameters. ``planted``: the fault that is planted
    here. ``loaders``: those of this process.
    """

    float64 = time_first = False

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.now = StepInProgress()
        self.loss_scale, self.gradients_are_scaled = 1.0, False
        self.steps_seen = 0
        self.planted: PlantedFault | None = None
        self.wrapped: list[tuple[Any, Lines]] = []
        self.no_sync_at: Lines | None = None
        self.hooked: list[Hooked] = []
        self.frozen = FrozenParameters()
        self._of_this_backward: dict[str, Tensor] = {}
        self._last_state: Tensor | None = None
        self.loaders = Loaders()
        self._scale_of_backward = self._scale_of_clip = 1.0
        self._read_inside: list[dict[int, None]] = []

    def is_on(self) -> bool:
        """False in a process that loads data."""
        return get_worker_info() is None

    @property
    def counts_grads(self) -> bool:
        """A call of ``torch.autograd.grad`` may be a backward pass of this step."""
        return True

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

    def ends_step(self) -> None:
        """An optimizer is about to step."""
        raise NotImplementedError

    def step_was_skipped(self) -> None:
        """A loss scaler has found gradients that are not finite, and left the step out."""
        self.now = StepInProgress()

    # --- events

    def handed_on(self, iterator: Any) -> Iterator[Any]:
        """What a loader yields that hands on the batches of a loader inside it."""
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
            self.frozen.forget()
            arguments, named = self.fed(name, arguments, named)
            rows = rows_of((arguments, named), TOP_OF_CALL)
            count = (with_rows_first(rows) if self.time_first else rows).count
            backwards, place = len(self.now.losses), place_of_caller()
            self.now.calls.append(SeenCall(name, backwards, count, place))
            self.now.call_rows.append(rows)
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

    def before_grad(self, outputs: Any, inputs: Any) -> bool:
        """``torch.autograd.grad`` is called. True if it counts as a backward pass: it computes
        gradients of parameters, and the script has not gone backward since the last step.
        """
        if (self.now.losses and not self.now.by_grad) or not self.counts_grads:
            return False
        if not any(map(self.names.of_parameter, tensors_of(inputs))):
            return False
        self.before_backward(tensors_of(outputs), by_grad=True)
        return True

    def before_backward(self, roots: Sequence[Tensor], by_grad: bool = False) -> None:
        """A backward pass begins. ``by_grad``: ``torch.autograd.grad`` computes it."""
        self.goes_on()
        if self.now.by_grad and not by_grad:
            self.now.forget_grads()
        self.now.by_grad = by_grad
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
                    self.now.frozen[name] = self.frozen.place_of(parameter)
                if name is None:
                    self.now.unnamed += parameter.requires_grad
                elif parameter.grad is None:
                    self.now.held[name] = None
                elif self.keeps_tensors:
                    self.now.held[name] = whole(parameter.grad, divided_by=scale)
        self.now.optimizers.append(type(optimizer).__name__)
        self.now.optimizer, self.now.stepped_at = optimizer, place_of_caller()
        self.ends_step()

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
