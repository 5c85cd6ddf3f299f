"""Notices every step of every optimizer, through torch's own hooks, also inside trainers.

Source: ``torch.optim.optimizer.register_optimizer_step_pre_hook`` and ``..._post_hook``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_equivalence.case.clipping import Clipping
from ddp_equivalence.case.steps import GradientKey

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

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count inside the block."""

        def before(optimizer: Optimizer, arguments: Arguments, named: Named) -> Changed | None:
            caller = sys._getframe(1)
            if self._inside and not _runs(self._outermost, caller):
                self._inside, self._waits_for_closure = 0, False
            self._inside += 1
            if self._inside != 1:
                return None
            self._outermost = caller
            self.seen += 1
            if _closure(arguments, named) is None:
                self.before(optimizer)
                return None
            return self._with_noticed_closure(optimizer, arguments, named)

        def after(optimizer: Optimizer, arguments: Arguments, named: Named) -> None:
            self._inside -= 1
            if self._inside == 0:
                self._outermost = None
                self._has_gradients(optimizer)
                self.after()

        handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._outermost = None  # it keeps what the step holds

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
    """What is taken at each step: the gradients, or else the weights after it.

    ``after_clipping``: the gradients are those that the optimizer steps with. Otherwise they are
    those from before one call of torch that clips them all, if nothing changes them after it.
    """

    gradients: bool = False
    after_clipping: bool = False


class StepRecord(StepCount):
    """What the parameters held at every step: their gradients before it, or their weights after it.

    Optimizers that step one after the other, without a backward pass in between, make one step.
    ``parameters``: the parameters by name, asked for at each step. ``gradients``, ``weights``:
    copies, by step and name. Of the gradients, those that the optimizers of the step were given.
    ``clips``: the calls of torch that clipped gradients. ``whole`` makes gradients whole where they
    are sharded, and ``weights`` reads the weights so.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        at_steps: AtSteps,
        ended: Callable[[int], None] = lambda number: None,
        whole: Callable[[dict[str, Tensor | None]], Mapping[str, Tensor | None]] = dict,
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
        if not self._at_steps.gradients:
            return
        parameters = self._parameters()
        its_own = {id(one) for group in optimizer.param_groups for one in group["params"]}
        named = {name: one for name, one in parameters.items() if id(one) in its_own} or parameters
        before_clipping: Mapping[int, Tensor] = {}
        if not self._at_steps.after_clipping:
            before_clipping = self._clipping.before(one.grad for one in named.values())
        found = {
            name: _copy(before_clipping.get(id(one.grad), one.grad)) for name, one in named.items()
        }
        self.gradients |= {(self.count - 1, name): one for name, one in self._whole(found).items()}

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
