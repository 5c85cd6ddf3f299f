"""Records the calls of a step that matter for its gradients, and the lines that made them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.comparison.element_sample import ElementSample
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    Contents,
    GradientChange,
    Kind,
)
from ddp_equivalence.measurement.code_lines import (
    callers_behind,
    callers_of,
    line_that_named,
    lines_of,
)
from ddp_equivalence.measurement.collective_contents import collective_call
from ddp_equivalence.measurement.further_calls import FurtherCalls, Lines
from ddp_equivalence.measurement.gradient_changes import changed_by_hooks, merged
from ddp_equivalence.measurement.gradient_watch import GradientWatch
from ddp_equivalence.measurement.line_events import LineEvents
from ddp_equivalence.measurement.line_tracer import LineTracer, code_of, merged_handlers
from ddp_equivalence.measurement.local_tensors import LocalTensors
from ddp_equivalence.measurement.loss_terms import LossTerms
from ddp_equivalence.measurement.loss_watch import LossWatch
from ddp_equivalence.measurement.module_watch import ModuleWatch
from ddp_equivalence.measurement.sharding import parameters_of, ranks_of
from ddp_equivalence.measurement.shuffles import randperm_recorded, shuffle_handlers
from ddp_equivalence.measurement.state_log import StateLog
from ddp_equivalence.measurement.synchronisation_watch import SynchronisationWatch
from ddp_equivalence.measurement.temporary_results import TemporaryResults
from ddp_equivalence.measurement.torch_calls import TorchCalls, facts_of_hook
from ddp_equivalence.measurement.trace import Trace
from ddp_equivalence.ranks.collectives import issued_so_far
from ddp_equivalence.ranks.issued_collectives import Issued, listening, some_are_pending

MOST_CALLS = 5_000  # later ones are not recorded
MOST_IN_VAIN = 20
"""A line after which no loss was found so often is not looked at again: long loops stay fast."""


class CallWatch:
    """Records what one rank's step does with the gradients of ``model``.

    ``sample``: the elements of each gradient that are kept. The caller says when the model is
    called, when backward runs and when a step begins. ``further`` records where examples, weights
    and losses come from. ``backwards``: the calls of backward that have begun in this step.
    ``inside_model``: also follow the lines of the model's own forward pass, in which a script may
    compute its loss.
    """

    def __init__(
        self, model: nn.Module, sample: ElementSample[str], inside_model: bool = False
    ) -> None:
        self._inside_model = inside_model
        self.step = 0
        self.calls: list[Call] = []
        self._model = model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._gradients = GradientWatch(model, sample)
        self._states = StateLog(self._gradients)
        self._losses = LossWatch(self._on_loss)
        self._terms = LossTerms(self._names, self.calls)
        self._in_vain: dict[CodeLine, int] = {}
        self._temporaries = TemporaryResults()
        self._locals = LocalTensors()
        self._synchronisation = SynchronisationWatch()
        self.further = FurtherCalls(model, self._gradients.parameters, self._append)
        torchs = TorchCalls(self._record, self._names).handlers()
        shuffles = {code_of(f): one for f, one in shuffle_handlers(self._on_shuffle).items()}
        self.events = LineEvents(
            model, self.now, self.calls, self._append_if_recorded, lambda: self._tracer.paused
        )
        events = self.events.handlers()
        handlers = merged_handlers(self.further.handlers(), torchs, shuffles, events)
        self._tracer = LineTracer(handlers, self._after_line, self._in_frame)
        self.events.attach(self._tracer, self._gradients)
        self.backwards = 0
        self._in_backward = False
        self._process = os.getpid()

    def begin_step(self, number: int) -> None:
        """What is recorded from now on belongs to this step."""
        self.step = self.further.step = number
        self.backwards = 0
        self.events.begin_step()
        self._terms.begin_step()

    def trace(self, modules: ModuleWatch) -> Trace:
        """The values on the way. ``modules``: has watched the modules of the same model."""
        return Trace(
            module_calls=tuple(modules.calls),
            states=tuple(self._states.states),
            each=self._states.each,
            complete=modules.complete and self._states.complete,
            lines_run=self._tracer.lines_run,
            times_run=self._tracer.times_run,
            local_tensors=tuple(self._locals.found),
        )

    @contextmanager
    def watching(self, running: FrameType | None = None) -> Iterator[None]:
        """Record inside the block. ``running``: as in ``LineTracer.tracing``."""
        with (
            listening(self._on_issue, self._on_wait),
            randperm_recorded(self._on_shuffle),
            self._tracer.tracing(running),
            self.events.cuts.watching(),
        ):
            yield
        self._note_changes(None, by_value=True)

    def forward(self, module: nn.Module) -> Callable[[], None]:
        """The model or a wrapper begins its forward pass. Call the result at its end."""
        frame = sys._getframe(1)
        chosen_at = line_that_named(module, frame)
        self._record(Kind.FORWARD, frame, what=type(module).__name__, chosen_at=chosen_at)
        before = self._tracer.paused
        self._tracer.paused = before or not self._inside_model

        def ended() -> None:
            self._tracer.paused = before

        return ended

    def was_wrapped(self, ddp: DistributedDataParallel, at: Lines, off_at: Lines | None) -> None:
        """A wrapper was made by these lines; ``off_at`` have switched synchronisation off."""
        names, ranks = parameters_of(ddp.module, self._names), ranks_of(vars(ddp))
        self._append_if_recorded(Kind.WRAP, at, what=type(ddp).__name__, names=names, ranks=ranks)
        self._synchronisation.add(ddp)
        if off_at is not None:
            self._append_if_recorded(Kind.SYNCHRONISATION, off_at, value=0.0)

    def was_hooked(self, hook: Any, state: object, at: Lines) -> None:
        """These lines gave a wrapper a communication hook."""
        self._append_if_recorded(Kind.HOOK, at, **facts_of_hook(hook, state))

    def were_made_before(self, calls: Sequence[Call]) -> None:
        """These calls were made before the model was watched."""
        self.calls.extend(calls[: MOST_CALLS // 2])

    @contextmanager
    def backward(
        self, roots: Sequence[Tensor], loss: float | None, own: Mapping[str, Tensor]
    ) -> Iterator[list[int | None]]:
        """The block is one backward pass from ``roots``. ``own``: gets the gradients that it
        computes, by parameter; empty if they are not added to ``.grad``. Yields a list that holds,
        after the block, how many collectives had been issued before it and at its end.
        """
        frame = sys._getframe(2)
        self._note_changes(frame, by_value=True)
        self.further.backward(roots)
        self._terms.backward()
        self.events.cuts.backward(roots)
        made_at = self._tracer.line_that_made(roots[0], frame) if len(roots) == 1 else None
        self._record(Kind.BACKWARD, frame, value=loss, made_at=made_at, callers=callers_of(frame))
        self.backwards += 1
        call = len(self.calls) - 1
        lines = lines_of(frame)
        paused, self._tracer.paused = self._tracer.paused, True
        self._in_backward = True
        issued = [issued_so_far()]
        try:
            yield issued
        finally:
            self._in_backward = False
            self.events.backward_ended()
            self._tracer.paused = paused
        issued.append(issued_so_far())
        if issued[0] is not None and issued[0] == issued[1]:
            for change in changed_by_hooks(self._gradients, own, self.calls[call:]):
                self._append(Kind.CHANGE, lines, change=change, in_backward=True)
        self._gradients.accept()
        self._states.note(call, tuple(self._gradients.parameters))

    def now(self) -> tuple[int, int, bool]:
        """The number of the step, how many calls of backward have begun, and whether one runs."""
        return self.step, self.backwards, self._in_backward

    def _on_loss(self, line: CodeLine, value: float, node: Any) -> None:
        if self._is_recorded():
            self._append(Kind.LOSS, (line, line), value=value, what=node.name())
            self._terms.add(len(self.calls) - 1, node)

    def _on_shuffle(self, frame: FrameType, what: str, seed: float | None) -> None:
        self._record(Kind.SHUFFLE, frame, value=seed, what=what)

    def _on_issue(self, issued: Issued, frame: FrameType) -> None:
        if not self._is_recorded():
            return
        self._note_changes(frame, by_value=True)
        collective = collective_call(
            issued,
            self._gradients.gradients,
            self._gradients.parameters,
            dict(self._model.named_buffers()),
        )
        self.further.parameters_go_out()
        if collective.contents is Contents.GRADIENTS:
            self._gradients.accept_these(collective.names, pending=True)
            issued.names = collective.names
        way = {"made_at": self.further.origin_of(issued.tensors), "callers": callers_of(frame)}
        self._record(Kind.COLLECTIVE, frame, collective=collective, **way)
        issued.call = len(self.calls) - 1
        self._locals.forget()
        if not self._tracer.paused:
            self._temporaries.add(issued, frame)

    def _on_wait(self, issued: Issued) -> None:
        if issued.names and self._is_recorded():
            self._gradients.accept_these(issued.names)
            self._states.note(issued.call, issued.names)

    def _in_frame(self, frame: FrameType, line: CodeLine | None, returned: object) -> None:
        if self._temporaries.waiting and line is not None:
            for number in self._temporaries.gone_after(frame):
                self._result_is_gone(number)
        self.further.values(frame, line, returned)
        if line is not None and line.function != "<module>":
            in_vain = self._in_vain.get(line, 0)
            if in_vain < MOST_IN_VAIN:
                found = self._losses.after_line(line, frame, returned)
                self._in_vain[line] = 0 if found else in_vain + 1
        if self.backwards and not some_are_pending():
            self._locals.after(frame, line, returned, self.step)

    def _result_is_gone(self, number: int) -> None:
        call = self.calls[number]
        if call.collective is not None:
            collective = replace(call.collective, result_is_gone=True)
            self.calls[number] = replace(call, collective=collective)

    def _after_line(self, line: CodeLine, by_value: bool) -> None:
        if not self._in_backward and self._is_recorded():
            self.further.after_line(line, by_value)
            for change in self._gradients.changes(by_value):
                way = callers_behind(line, sys._getframe(1))
                self._append_change((line, line), change, way)
            for flag in self._synchronisation.changes():
                self._append(Kind.SYNCHRONISATION, (line, line), value=float(flag))

    def _note_changes(self, frame: FrameType | None, by_value: bool) -> None:
        """Note what nobody has noticed after a line: it was done before ``frame`` goes on."""
        if self._in_backward:
            return
        for change in self._gradients.changes(by_value):
            self._append_change(lines_of(frame), replace(change, exact=False))

    def _append_change(
        self, lines: Lines, change: GradientChange, callers: tuple[CodeLine, ...] = ()
    ) -> None:
        """Record the change, together with the last one if the same line has made both."""
        names_now = change.names
        last = self.calls[-1] if self.calls else None
        if last is not None and last.change is not None and merged(last, lines[0], change):
            self.calls.pop()
            change = replace(change, names=last.change.names + change.names)
        self._append(Kind.CHANGE, lines, change=change, callers=callers)
        self._states.note(len(self.calls) - 1, names_now)

    def _is_recorded(self) -> bool:
        return os.getpid() == self._process and len(self.calls) < MOST_CALLS

    def _record(self, kind: Kind, frame: FrameType | None, **more: Any) -> None:
        self._append_if_recorded(kind, lines_of(frame), **more)

    def _append_if_recorded(self, kind: Kind, lines: Any, **more: Any) -> None:
        if self._is_recorded():
            self._append(kind, lines, **more)

    def _append(
        self,
        kind: Kind,
        lines: tuple[CodeLine | None, CodeLine | None],
        in_backward: bool = False,
        **more: Any,
    ) -> None:
        self.calls.append(
            Call(
                kind,
                *lines,
                step=self.step,
                backwards=self.backwards,
                in_backward=in_backward or self._in_backward,
                **more,
            )
        )
