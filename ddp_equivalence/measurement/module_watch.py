"""Keeps samples of what each module of a model was given and returned in a watched step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.code_lines import lines_of
from ddp_equivalence.measurement.module_calls import Heard, heard
from ddp_equivalence.measurement.plain_tensors import plain
from ddp_equivalence.measurement.trace import ModuleCall, TensorSample

MOST_CALLS = 2_000
"""Later calls are not recorded."""

MOST_MODULES = 500
"""Of a model with more modules only so many are heard."""


class ModuleWatch:
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs. ``off_at()``: the line that has turned gradients off, if it is known.
    """

    def __init__(
        self,
        model: nn.Module,
        now: Callable[[], tuple[int, int, bool]],
        off_at: Callable[[], CodeLine | None] = lambda: None,
    ) -> None:
        self.calls: list[ModuleCall] = []
        self.complete = True
        self._now = now
        self._off_at = off_at
        self._modules = list(model.named_modules())
        self._ticks = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside the block."""
        self.complete &= len(self._modules) <= MOST_MODULES
        with ExitStack() as listening:
            for name, module in self._modules[:MOST_MODULES]:
                listening.enter_context(heard(module, partial(self._on_call, name, module)))
            yield

    def _on_call(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> Heard:
        step, backwards, in_backward = self._now()
        if in_backward:
            return None
        with_gradients = torch.is_grad_enabled()
        off_at = None if with_gradients else self._off_at()
        if len(self.calls) >= MOST_CALLS:
            self.complete = False
            return None
        given = _sample(arguments)
        line = lines_of(sys._getframe(1))[1]
        training = module.training
        began = self._tick()

        def ended(result: object) -> None:
            self.calls.append(
                ModuleCall(
                    name=name,
                    kind=type(module).__name__,
                    step=step,
                    backwards=backwards,
                    line=line,
                    given=given,
                    returned=_sample(result),
                    order=(began, self._tick()),
                    training=training,
                    with_gradients=with_gradients,
                    off_at=off_at,
                )
            )

        return ended

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks


def _sample(values: object) -> TensorSample | None:
    """A sample of the first tensor of floating-point numbers; None if there is none."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            try:
                return TensorSample.of(plain(leaf))
            except Exception:  # its values are not known
                return None
    return None
