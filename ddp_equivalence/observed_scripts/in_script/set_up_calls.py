"""Records what a script does with torch before its model is called, with the lines that do it.

Groups, samplers, loaders, seeds and hooks are made then, and a step is watched only from the first
call of its model on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from torch.utils.data._utils.worker import _worker_loop

from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.code_lines import lines_of
from ddp_equivalence.measurement.further_calls import Lines
from ddp_equivalence.measurement.line_tracer import code_of, merged_handlers, without_failing
from ddp_equivalence.measurement.registering_calls import RegisteringCalls
from ddp_equivalence.measurement.torch_calls import TorchCalls

RECORDED = {
    *(Kind.NEW_GROUP, Kind.SEED, Kind.SAMPLER, Kind.LOADER, Kind.TENSOR_HOOK, Kind.IGNORE),
}

MOST = 500
"""Later calls of a longer set-up are not recorded."""

HERE = os.path.dirname(os.path.abspath(__file__))


class SetUpCalls:
    """Records in this thread, from ``begin`` to ``end``."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        names = _Numbers()
        of_torch = TorchCalls(self._record, names).handlers()
        registering = RegisteringCalls(self._append, names).handlers()
        in_worker = {code_of(_worker_loop): lambda frame: self.stop()}  # of a loader, by fork
        self._handlers = merged_handlers(of_torch, registering, in_worker)

    def begin(self) -> None:
        """Record from now on, unless the script is run under a profiler."""
        if sys.getprofile() is None:
            sys.setprofile(self._on_event)

    def end(self, names: Mapping[int, str]) -> Sequence[Call]:
        """Stop, and return what was recorded. ``names``: the id of a parameter -> its name."""
        self.stop()
        return [found for call in self._calls if (found := _with_names(call, names)) is not None]

    def stop(self) -> None:
        """Record nothing any more: every call of Python takes longer until then."""
        if sys.getprofile() == self._on_event:
            sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        handler = self._handlers.get(frame.f_code)
        caller = frame.f_back
        if handler is None or (caller and caller.f_code.co_filename.startswith(HERE)):
            return
        without_failing(handler, frame)

    def _record(self, kind: Kind, frame: FrameType | None, **more: Any) -> None:
        self._append(kind, lines_of(frame), **more)

    def _append(self, kind: Kind, lines: Lines, **more: Any) -> None:
        if kind in RECORDED and lines[0] is not None:
            self._calls.append(Call(kind, *lines, step=0, backwards=0, **more))
        if len(self._calls) >= MOST:
            self.stop()


class _Numbers(dict[int, str]):
    """Gives every parameter its id as a name: the model is not known yet."""

    def get(self, key: int, default: Any = None) -> str:
        return str(key)


def _with_names(call: Call, names: Mapping[int, str]) -> Call | None:
    """The call with the names of parameters; None if it is about other tensors."""
    found = tuple(names[int(one)] for one in call.names if int(one) in names)
    return None if call.names and not found else replace(call, names=found)
