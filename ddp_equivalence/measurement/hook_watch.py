"""Notices which lines of the user's hooks change gradients while a backward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor, nn

from ddp_equivalence.measurement.calls import Call, CodeLine, CollectiveCall, Kind
from ddp_equivalence.measurement.code_lines import callers_of, line_at
from ddp_equivalence.measurement.gradient_watch import GradientWatch, State, change_between
from ddp_equivalence.measurement.line_tracer import may_hide

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
        self._racing: set[str] = set()
        """The gradients that a collective may change at any time."""

    def backward_ended(self) -> None:
        """No hook runs any longer."""
        self._running.clear()
        self._racing.clear()

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
        for name in self._names_in(frame):
            if name not in running.states:
                self._look_at(running, name)
        running.line = line_at(frame) if event == "line" else None
        running.issued = len(self._calls)

    def _names_in(self, frame: FrameType) -> list[str]:
        """The parameters that a function holds, and those of whose gradients it was given one."""
        parameters = self._gradients.parameters
        known = {name for one in self._running.values() for name in one.states}
        gradients = {id(parameters[name].grad): name for name in known}
        found = []
        for value in frame.f_locals.values():
            names = self._names if isinstance(value, nn.Parameter) else gradients
            name = names.get(id(value)) if isinstance(value, Tensor) else None
            if name is not None and name not in self._racing:
                found.append(name)
        return found

    def _line_has_run(self, frame: FrameType, running: _Running) -> None:
        line = running.line
        hidden = line is not None and may_hide(line.file, line.number)
        for name, before in list(running.states.items()):
            reduced = self._reduced(name, running.issued)
            if reduced:  # it may have changed the values without a new version
                if any(one.asynchronous for one in reduced):
                    self._racing.add(name)
                    del running.states[name]
                else:
                    self._look_at(running, name)
                continue
            if self._gradients.state_now(name) == before and not hidden:
                continue
            old = running.values[name]
            self._look_at(running, name)
            change = change_between(name, old, running.values[name])
            if change is None:
                continue
            for other in self._running.values():
                if other is not running and name in other.states:
                    self._look_at(other, name)
            self._left -= 1
            self._append(Kind.CHANGE, (line, line), change=change, callers=callers_of(frame))

    def _look_at(self, running: _Running, name: str) -> None:
        running.states[name] = self._gradients.state_now(name)
        running.values[name] = self._gradients.value_now(name)

    def _reduced(self, name: str, since: int) -> list[CollectiveCall]:
        """The collectives that have been issued for a gradient since then."""
        return [
            call.collective
            for call in self._calls[since:]
            if call.collective is not None and name in call.collective.names
        ]
