"""Watches one rank's model while its step runs.

A step is watched only if its gradients differ: the ranks then run it a second time under an
``Observer``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.random_state import seed_in_use
from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.measurement.call_watch import CallWatch
from ddp_equivalence.measurement.calling_thread import backward_on_calling_thread
from ddp_equivalence.measurement.calls import Call
from ddp_equivalence.measurement.code_lines import lines_of
from ddp_equivalence.measurement.declared_rows import DeclaredRows
from ddp_equivalence.measurement.example_lookup import ExampleLookup
from ddp_equivalence.measurement.further_calls import Lines
from ddp_equivalence.measurement.module_calls import Heard, heard
from ddp_equivalence.measurement.module_watch import ModuleWatch
from ddp_equivalence.measurement.observation import (
    Backward,
    Forward,
    Observation,
)
from ddp_equivalence.measurement.plain_tensors import plain
from ddp_equivalence.measurement.wrapper_observer import WrapperObserver
from ddp_equivalence.ranks.collectives import Collective
from ddp_equivalence.ranks.torch_frames import counts_as_torch


class Observer:
    """``lookup``: recognises examples in the model's inputs. ``declared``: the rows that the step
    says it reads. ``sample``: the elements of each gradient that are kept. ``inside_model``: as in
    ``CallWatch``.
    """

    def __init__(
        self,
        model: nn.Module,
        lookup: ExampleLookup,
        declared: DeclaredRows,
        sample: ElementSample[str],
        inside_model: bool = False,
    ) -> None:
        self._model = model
        self._sample = sample
        self._local_gradient: dict[str, Tensor] = {}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._lookup, self._declared = lookup, declared
        self._forwards: list[Forward] = []
        self.backwards: list[Backward] = []
        self._wrappers: list[WrapperObserver] = []
        self._clipped: list[float] = []
        self._inside = False
        self._calls = CallWatch(model, sample, inside_model)
        self._modules = ModuleWatch(model, self._calls.now, self._calls.events.cuts.off_at)
        self._step = 0

    @property
    def step(self) -> int:
        """The number of the step that runs; the caller sets it before each step."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self._calls.begin_step(number)

    @contextmanager
    def watching(self, running: FrameType | None = None) -> Iterator[None]:
        """Watch inside the block. ``running``: also follow the functions that run already, the
        innermost of which this is.
        """
        handles = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name in self._sample.sizes:
                # The hook sees the gradient before it is added to .grad, and before DDP sees it.
                handles.append(parameter.register_hook(partial(self._on_gradient, name)))
        initialise = DistributedDataParallel.__init__
        clip = torch.nn.utils.clip_grad_norm_

        @counts_as_torch
        def wrapping(ddp: Any, *arguments: Any, **named: Any) -> None:
            initialise(ddp, *arguments, **named)
            self._calls.was_wrapped(ddp, lines_of(sys._getframe(1)), None)
            self._wrappers.append(WrapperObserver(ddp, self._names, self._calls))

        def clipping(parameters: Any, max_norm: float, *arguments: Any, **named: Any) -> Tensor:
            self._clipped.append(float(max_norm))
            return clip(parameters, max_norm, *arguments, **named)

        try:
            with (
                backward_on_calling_thread(),
                heard(self._model, self._on_forward),
                self._modules.watching(),
                patch.object(DistributedDataParallel, "__init__", wrapping),
                patch.object(torch.nn.utils, "clip_grad_norm_", clipping),
                patch.object(torch.autograd, "backward", self._observed(torch.autograd.backward)),
                patch.object(torch.autograd, "grad", self._observed(torch.autograd.grad)),
                self._calls.watching(running),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
            for wrapper in self._wrappers:
                wrapper.stop()

    def was_wrapped(
        self, ddp: DistributedDataParallel, lines: Lines, off_at: Lines | None = None
    ) -> None:
        """The model was wrapped before it was watched, by these lines. ``off_at``: those that have
        switched synchronisation off since then, if it is off.
        """
        self._calls.was_wrapped(ddp, lines, off_at)
        self._wrappers.append(WrapperObserver(ddp, self._names, self._calls))

    def was_hooked(self, hook: Any, state: object, lines: Lines) -> None:
        """These lines gave a wrapper a communication hook, before the model was watched."""
        self._calls.was_hooked(hook, state, lines)

    def was_set_up(self, calls: Sequence[Call]) -> None:
        """These calls were made before the model was watched."""
        self._calls.were_made_before(calls)

    def found(
        self,
        gradients: Mapping[GradientKey, Tensor | None],
        collectives: tuple[Collective, ...] | None,
    ) -> Observation:
        """Everything that was seen. ``gradients``: what the step has left."""
        return Observation(
            forwards=tuple(self._forwards),
            backwards=tuple(self.backwards),
            wrappers=tuple(wrapper.observed() for wrapper in self._wrappers),
            frozen=tuple(
                self._names.get(id(parameter), name)
                for name, parameter in self._model.named_parameters()
                if not parameter.requires_grad
            ),
            buffers=digest(dict(self._model.named_buffers())),
            gradients={key: digest({key[1]: gradient}) for key, gradient in gradients.items()},
            clipped=tuple(self._clipped),
            collectives=collectives,
            equal_examples=self._lookup.equal_examples(),
            calls=tuple(self._calls.calls),
            lines_run=tuple(self._calls.further.lines_run),
            trace=self._calls.trace(self._modules),
            cuts=self._calls.events.cuts.found,
            own_backwards=self._calls.events.own_backwards.found,
        )

    def _on_forward(self, arguments: tuple[Any, ...]) -> Heard:
        if not torch.is_grad_enabled():
            return None
        rows = self._declared.or_recognised(self._lookup.rows_of(arguments))
        examples = rows.if_certain if rows is not None else ()
        self._calls.further.forward(sys._getframe(), arguments, examples)
        ended = self._calls.forward(self._model)
        self._forwards.append(
            Forward(
                rows=rows,
                weights=_digest_of_weights(self._model),
                generator=torch.get_rng_state().numpy().tobytes(),
                seed=seed_in_use(),
                step=self.step,
                buffers=self._calls.events.buffers.values(),
            )
        )
        return lambda _: ended()

    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        try:
            value = self._sample.of_one(name, plain(gradient))
        except Exception:  # never fail in the user's backward pass
            return
        self._local_gradient[name] = (
            self._local_gradient[name] + value if name in self._local_gradient else value
        )

    def _is_aside(self, outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> bool:
        """True for a call of ``torch.autograd.grad`` that is a part of the loss and not a backward
        pass, such as for a gradient penalty or for the weight of a term: it keeps the graph, and
        asks for the gradients of few parameters.
        """
        graph = [named.get("retain_graph"), named.get("create_graph"), *arguments[1:3]]
        of_trained = {id(p) for p in self._model.parameters() if p.requires_grad}
        several = inputs.values() if isinstance(inputs, Mapping) else inputs
        asked = [inputs] if isinstance(inputs, Tensor) else list(several)
        return any(graph) and 2 * len({id(one) for one in asked} & of_trained) < len(of_trained)

    def _observed(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``torch.autograd.backward`` or ``grad`` so that each call is recorded."""
        accumulate = torch.autograd.backward

        @counts_as_torch
        def observed(*arguments: Any, **named: Any) -> Any:
            roots = _roots(arguments, named)
            if self._inside:  # activation checkpointing calls backward inside backward
                self._calls.events.cuts.backward(roots)
                return differentiate(*arguments, **named)
            if differentiate is not accumulate and self._is_aside(*arguments, **named):
                return differentiate(*arguments, **named)
            loss = _sum_of_scalars(roots)
            for wrapper in self._wrappers:
                wrapper.backward_begins()
            self._local_gradient = {}
            self._inside = True
            own = (
                self._local_gradient
                if differentiate is accumulate and not named.get("inputs")
                else {}
            )
            try:
                with self._calls.backward(roots, loss, own) as issued:
                    result = differentiate(*arguments, **named)
            finally:
                self._inside = False
            self.backwards.append(
                Backward(
                    loss=loss,
                    forwards=len(self._forwards),
                    issued=(issued[0], issued[1]),
                    step=self.step,
                    gradient=self._sample.joined(self._local_gradient)
                    if self._local_gradient
                    else None,
                )
            )
            self._local_gradient = {}
            return result

        return observed


def _roots(arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Tensor]:
    """What ``torch.autograd.backward`` or ``grad`` is to differentiate."""
    given = arguments[0] if arguments else named.get("tensors", named.get("outputs"))
    return [given] if isinstance(given, Tensor) else list(given or ())


def _sum_of_scalars(roots: Sequence[Tensor]) -> float | None:
    """The sum of the scalars that backward is called on; None if there is none, or not known."""
    try:
        with torch._C._DisableFuncTorch():
            scalars = [value for root in roots if (value := plain(root)).numel() == 1]
            return sum(float(value.detach()) for value in scalars) if scalars else None
    except Exception:
        return None


def _digest_of_weights(model: nn.Module) -> str:
    """A digest of the weights; "" if a compiler or a transform of torch.func holds them."""
    try:
        return digest({name: plain(weight) for name, weight in model.named_parameters()})
    except Exception:
        return ""
