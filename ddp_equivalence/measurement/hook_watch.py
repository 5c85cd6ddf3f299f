"""Notices which lines of the user's hooks change gradients while a backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor, nn

from ddp_equivalence.measurement.calls import Call, CodeLine, Kind
from ddp_equivalence.measurement.code_lines import callers_of, line_at
from ddp_equivalence.measurement.gradient_watch import GradientWatch, State, change_between

MOST_CHANGES = 2_000
"""Later changes are not recorded."""


@dataclass
class _Running:
    """A function of the user's that runs. ``line``: of it that runs. ``issued``: how many calls had
    been recorded before this line.
    """

    line: CodeLine | None = None
    issued: int = 0
    states: dict[str, State] = field(default_factory=dict)
    values: dict[str, Tensor | None] = field(default_factory=dict)


class HookWatch:
    """Only the parameters that a variable of the function holds are looked at, so that hooks on
    many parameters stay fast. ``calls``: those of the step, to which ``append`` adds one.
    """

    def __init__(
        self, gradients: GradientWatch, calls: Sequence[Call], append: Callable[..., None]
    ) -> None:
        self._gradients = gradients
        self._names = {id(one): name for name, one in gradients.parameters.items()}
        self._calls = calls
        self._append = append
        self._running: dict[int, _Running] = {}
        self._left = MOST_CHANGES

    def on_event(self, frame: FrameType, event: str) -> None:
        """A function begins or returns inside a backward pass, or a line of it is to run."""
        if not self._left:
            return
        if event == "call":
            self._running[id(frame)] = _Running()
        running = self._running.get(id(frame))
        if running is None:
            return
        if running.line is not None:
            self._line_has_run(frame, running)
        if event == "return":
            del self._running[id(frame)]
            return
        for value in frame.f_locals.values():
            name = self._names.get(id(value)) if isinstance(value, nn.Parameter) else None
            if name is not None and name not in running.states:
                self._look_at(running, name)
        running.line = line_at(frame) if event == "line" else None
        running.issued = len(self._calls)

    def _line_has_run(self, frame: FrameType, running: _Running) -> None:
        for name, before in list(running.states.items()):
            if self._gradients.state_now(name) == before:
                continue
            old = running.values[name]
            self._look_at(running, name)
            change = change_between(name, old, running.values[name])
            if change is None or self._was_reduced(name, running.issued):
                continue
            for other in self._running.values():
                if other is not running and name in other.states:
                    self._look_at(other, name)
            self._left -= 1
            lines = running.line, running.line
            self._append(Kind.CHANGE, lines, change=change, callers=callers_of(frame))

    def _look_at(self, running: _Running, name: str) -> None:
        running.states[name] = self._gradients.state_now(name)
        running.values[name] = self._gradients.value_now(name)

    def _was_reduced(self, name: str, since: int) -> bool:
        """True if a collective has changed the gradient since then."""
        return any(
            call.collective is not None and name in call.collective.names
            for call in self._calls[since:]
        )
