"""What is looked at with every line of the user's code, also inside a forward or backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import CodeType, FrameType

from torch import nn

from ddp_equivalence.measurement.buffer_watch import BufferWatch
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from ddp_equivalence.measurement.code_lines import line_at, lines_of
from ddp_equivalence.measurement.cut_watch import CutWatch
from ddp_equivalence.measurement.draw_watch import DrawWatch
from ddp_equivalence.measurement.gradient_watch import GradientWatch
from ddp_equivalence.measurement.hook_results import HookResults
from ddp_equivalence.measurement.hook_watch import HookWatch
from ddp_equivalence.measurement.line_tracer import (
    Handler,
    LineTracer,
    line_of_caller,
    merged_handlers,
)
from ddp_equivalence.measurement.module_states import ModuleStates
from ddp_equivalence.measurement.own_backwards import OwnBackwards


class LineEvents:
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs. ``calls``: those of the step, to which ``append(kind, lines, ...)`` adds one.
    ``in_forward()``: whether a forward pass of the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        now: Callable[[], tuple[int, int, bool]],
        calls: list[Call],
        append: Callable[..., None],
        in_forward: Callable[[], bool],
    ) -> None:
        self.cuts = CutWatch(now)
        self.own_backwards = OwnBackwards(now)
        self.buffers = BufferWatch(model)
        self._states = ModuleStates(model, self._on_state)
        self._draws = DrawWatch(self._on_draw)
        self._now = now
        self._calls = calls
        self._append = append
        self._in_forward = in_forward
        self._hooks: HookWatch | None = None
        self._results = HookResults(append)
        self._line: CodeLine | None = None

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        return merged_handlers(
            self._states.handlers(), self.cuts.handlers(), self._results.handlers()
        )

    def attach(self, tracer: LineTracer, gradients: GradientWatch) -> None:
        """From now on the tracer tells of its events. ``gradients``: of the same model."""
        self._hooks = HookWatch(gradients, self._calls, self._append)
        tracer.on_event = self.on_event
        tracer.around_compiler = self.cuts.around_compiler

    def begin_step(self) -> None:
        """What happens from now on belongs to the next step."""
        self._line = None
        self.buffers.changed()
        self._draws.begin_step()

    def backward_ended(self) -> None:
        """No hook runs any longer."""
        self._results.tell_of_all()
        if self._hooks is not None:
            self._hooks.backward_ended()

    def on_event(self, frame: FrameType, event: str, returned: object) -> None:
        """A function of the user's begins or returns, or a line of it is to run."""
        _, _, in_backward = self._now()
        if event != "call":
            self._ended(line_at(frame) if event == "line" else line_of_caller(frame), in_backward)
        if event == "return":
            self.cuts.frame_returns(frame)
        if in_backward and self._hooks is not None:
            self._hooks.on_event(frame, event)
            self._results.on_event(frame, event, returned)
        if in_backward and event == "call":
            self.cuts.frame_begins(frame)
        elif in_backward and event == "return":
            self.own_backwards.on_return(frame, returned)

    def _ended(self, following: CodeLine | None, in_backward: bool) -> None:
        """A line, or a part of one, has run, and this one follows."""
        names = self.buffers.changed()
        if names and self._line is not None:
            self._append(Kind.BUFFERS, (self._line, self._line), names=names)
        self._line = following
        if not in_backward:  # what is computed again in backward draws the same numbers again
            self._draws.next_line(following)

    def _on_draw(self, line: CodeLine, what: str) -> None:
        _, _, in_backward = self._now()
        if not in_backward:
            self._append(Kind.DRAW, (line, line), what=what, value=float(self._in_forward()))

    def _on_state(self, frame: FrameType, what: str, name: str) -> None:
        last, lines = self._calls[-1] if self._calls else None, lines_of(frame)
        this = Kind.MODULE_STATE, *lines, what
        if last is not None and (last.kind, last.line, last.users_line, last.what) == this:
            self._calls[-1] = replace(last, names=(*last.names, name))
        else:
            self._append(Kind.MODULE_STATE, lines, what=what, names=(name,))
