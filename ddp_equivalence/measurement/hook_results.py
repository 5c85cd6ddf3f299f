"""Notices hooks that compute a gradient and do not give it back, so that nothing can use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.measurement.code_lines import is_users, line_at, users_code_of
from ddp_equivalence.measurement.line_tracer import Handler

REGISTERING: tuple[Any, ...] = (
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    nn.Module.register_full_backward_hook,
    nn.Module.register_full_backward_pre_hook,
)
"""Their hooks give a gradient back by returning it, or, the second one, by writing it to .grad."""

MOST_FOUND = 200
"""Later ones are not recorded."""


@dataclass
class _Running:
    """A hook that runs. ``set_at``: variable -> the id of its tensor, and the line that set it."""

    registered_by: str
    shapes: frozenset[tuple[int, ...]]
    memory: frozenset[int]
    line: CodeLine | None = None
    set_at: dict[str, tuple[int, CodeLine]] = field(default_factory=dict)


class HookResults:
    """``append(kind, lines, ...)`` adds a call to those of the step."""

    def __init__(self, append: Callable[..., None]) -> None:
        self._append = append
        self._hooks: dict[CodeType, str] = {}
        self._running: dict[int, _Running] = {}
        self._ended: list[tuple[_Running, dict[str, list[StorageWeakRef]]]] = []
        self._left = MOST_FOUND

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions that register hooks."""
        return {one.__code__: self._on_register for one in REGISTERING}

    def _on_register(self, frame: FrameType) -> None:
        code = users_code_of(frame.f_locals.get("hook"))
        if code is not None:
            self._hooks[code] = frame.f_code.co_name

    def on_event(self, frame: FrameType, event: str, returned: object) -> None:
        """A function begins or returns inside a backward pass, or a line of it is to run."""
        if self._ended:
            self._tell_of_ended()
        if event == "call":
            self._begin(frame)
            return
        running = self._running.get(id(frame))
        if running is None:
            return
        self._note_variables(frame, running)
        running.line = line_at(frame)
        if event == "return":
            del self._running[id(frame)]
            self._end(frame, running, returned)

    def tell_of_all(self) -> None:
        """The backward pass has ended."""
        self._tell_of_ended()
        self._running.clear()

    def _begin(self, frame: FrameType) -> None:
        registered = self._hooks.get(frame.f_code)
        called_by_user = frame.f_back is not None and is_users(frame.f_back.f_code.co_filename)
        if registered is None or called_by_user or not self._left:
            return
        given = [one for value in frame.f_locals.values() for one in _tensors(value)]
        given += [one.grad for one in given if one.is_leaf and one.grad is not None]
        shapes = frozenset(tuple(one.shape) for one in given)
        self._running[id(frame)] = _Running(registered, shapes, frozenset(map(_memory, given)))

    def _note_variables(self, frame: FrameType, running: _Running) -> None:
        """Note which variables the line that has run has set."""
        for name, value in frame.f_locals.items():
            if isinstance(value, Tensor | list | tuple):
                before = running.set_at.get(name)
                if (before is None or before[0] != id(value)) and running.line is not None:
                    running.set_at[name] = id(value), running.line

    def _end(self, frame: FrameType, running: _Running, returned: object) -> None:
        new: dict[str, list[StorageWeakRef]] = {}
        if returned is not None:
            return
        for name in running.set_at:
            found = list(_tensors(frame.f_locals.get(name)))
            if found and all(self._is_new(one, running) for one in found):
                new[name] = [StorageWeakRef(one.untyped_storage()) for one in found]
        if new:
            self._ended.append((running, new))

    def _is_new(self, tensor: Tensor, running: _Running) -> bool:
        """True if a tensor may stand for a gradient that was given, and is not this itself."""
        return tuple(tensor.shape) in running.shapes and _memory(tensor) not in running.memory

    def _tell_of_ended(self) -> None:
        ended, self._ended = self._ended, []
        for running, new in ended:
            for name, memory in new.items():
                if all(one.expired() for one in memory):
                    line, by = running.set_at[name][1], (running.registered_by,)
                    self._left = max(0, self._left - 1)
                    self._append(Kind.DROPPED, (line, line), what=name, names=by)


def _tensors(value: object) -> Iterator[Tensor]:
    """A tensor, or those in a list or tuple of a hook."""
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, Tensor) and one.is_floating_point():
            yield one


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
