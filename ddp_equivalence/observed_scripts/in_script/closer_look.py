"""Watches one step of a rank line by line, as the steps of check are watched."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data._utils.worker import _worker_loop

from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.measurement.call_watch import Lines, TorchCalls
from ddp_equivalence.measurement.calls import Call, Kind, Operations
from ddp_equivalence.measurement.lines import code_of, merged_handlers, without_failing
from ddp_equivalence.measurement.observation import Observation, RowsRead
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.measurement.returned import DeclaredRows
from ddp_equivalence.observed_scripts.in_script.kept_tensors import unwrapped
from ddp_equivalence.observed_scripts.in_script.watch import Watch
from ddp_equivalence.observed_scripts.queries import LookAt
from ddp_equivalence.observed_scripts.record import write_whole
from ddp_equivalence.ranks.collectives import (
    new_collectives,
    trust_recorder_that_has_entries,
    watch_handles,
)

FILE = "closer_look.pt"
"""Holds an ``Observation`` and, if they were logged, ``Operations``."""


class CloserLook:
    """Watches one step of a rank, from the first call of the module on. Until then, it records the
    calls of the set-up, and logs what the script does with a batch. ``is_open``: it watches now.
    """

    def __init__(self, look_at: LookAt) -> None:
        self.look_at = look_at
        self.is_open = self._has_looked = False
        self._open, self._set_up = ExitStack(), SetUpCalls()
        self._operations: LoggedOperations | None = None
        if look_at.set_up:
            self._set_up.begin()

    def set_up_ends(self) -> None:
        """An optimizer steps for the first time."""
        self._set_up.stop()

    def gets_batch(self) -> None:
        """The script gets a batch of the step, of which this may be the first one."""
        if not self.look_at.operations or self._has_looked:
            return
        if self._operations is None or self._operations.stop():  # it was a batch before the step's
            self._operations = LoggedOperations.begun()

    def begin(self, rank: int, module: nn.Module, watch: Watch) -> None:
        """Watch from here on, if this is the first call of the module. The user's functions that
        are running now are followed too.
        """
        if self._has_looked:
            return
        self.is_open = self._has_looked = True
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        set_up = self._set_up.end(names)
        rows = _RowsOfCalls(self.look_at.rows[rank])
        declared, kept = DeclaredRows([()]), self.look_at.sample
        observer = Observer(module, rows, declared, kept, inside_model=True)  # type: ignore[arg-type]
        self._module, self._observer = module, observer
        rows.backwards = observer.backwards
        watch_handles()  # so that the observer is told of collectives
        trust_recorder_that_has_entries()
        new_collectives()  # those before are no evidence
        observer.was_set_up(set_up)
        self._open.enter_context(observer.watching(sys._getframe(1)))
        for ddp, lines in watch.wrapped:
            if unwrapped(ddp) is module:
                off_at = None if ddp.require_backward_grad_sync else watch.no_sync_at
                observer.was_wrapped(ddp, lines, off_at)
        if self.look_at.operations:
            self._operations = self._operations or LoggedOperations.begun()

    def end(
        self, gradients: Mapping[str, Tensor | None], scales: Sequence[float], folder: Path
    ) -> None:
        """Stop watching, and write what was seen. ``gradients``: those that are compared, without
        a loss scale. ``scales``: the loss scale of each backward pass.
        """
        self.is_open = False
        operations = self._operations and self._operations.stopped(self._module)
        self._open.close()
        prefix = f"{self.look_at.module}:"
        of_module: dict[GradientKey, Tensor | None] = {
            (0, name.removeprefix(prefix)): gradient
            for name, gradient in gradients.items()
            if name.startswith(prefix)
        }
        found = self._observer.found(of_module, new_collectives())
        write_whole(folder / FILE, (_unscaled(found, scales), operations))


def _unscaled(found: Observation, scales: Sequence[float]) -> Observation:
    """Losses and own gradients as they are without the loss scale."""
    if len(found.backwards) != len(scales):
        return found
    backwards = tuple(
        replace(
            one,
            loss=None if one.loss is None else one.loss / scale,
            gradient=None if one.gradient is None else one.gradient / scale,
        )
        for one, scale in zip(found.backwards, scales, strict=True)
    )
    return replace(found, backwards=backwards)


class _RowsOfCalls:
    """Tells which rows the model is called with: those of the next micro-batch."""

    def __init__(self, micro_batches: Sequence[tuple[int, int]]) -> None:
        self._micro_batches = micro_batches
        self.backwards: Sequence[object] = ()

    def rows_of(self, arguments: object) -> RowsRead | None:
        """The rows of the big batch that this rank reads before its next backward pass."""
        number = len(self.backwards)
        if number >= len(self._micro_batches):
            return None
        first, count = self._micro_batches[number]
        return RowsRead(tuple((first + row,) for row in range(count)))

    def equal_examples(self) -> tuple[tuple[int, ...], ...]:
        """No rows are known to be equal."""
        return ()


# Records what a script does with torch before its model is called, with the lines that do it.
#
# Groups, samplers, loaders, seeds and hooks are made then, and a step is watched only from the
# first call of its model on.

RECORDED = {
    *(Kind.NEW_GROUP, Kind.SEED, Kind.SAMPLER, Kind.LOADER, Kind.HOOK, Kind.TENSOR_HOOK),
    Kind.IGNORE,
}

MOST = 500
"""Later calls of a longer set-up are not recorded."""

HERE = os.path.dirname(os.path.abspath(__file__))


class SetUpCalls:
    """Records in this thread, from ``begin`` to ``end``."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        names = _Numbers()
        of_torch = TorchCalls(self._append, names).handlers()
        in_worker = {code_of(_worker_loop): lambda frame: self.stop()}  # of a loader, by fork
        self._handlers = merged_handlers(of_torch, in_worker)

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


# Logs the operations of one step of a script, on a rank or in one process, as ``check`` does.


class LoggedOperations:
    """Logs from now on."""

    def __init__(self) -> None:
        self._log = OperationLog()
        self._log.__enter__()

    @classmethod
    def begun(cls) -> LoggedOperations | None:
        """A log that has begun; None inside a mode of the script, whose end would end the log."""
        return cls() if _get_current_dispatch_mode() is None else None

    def stop(self) -> bool:
        """Log nothing any more. False if it cannot be ended, and nothing can be said: the script
        has begun a mode of its own, and goes on in it.
        """
        if _get_current_dispatch_mode() is not self._log:
            return False
        self._log.__exit__(None, None, None)
        return True

    def stopped(self, module: nn.Module) -> Operations | None:
        """The operations that were logged; None if the log cannot be ended. ``module``: the one
        whose gradients are compared.
        """
        if not self.stop():
            return None
        gradients = {name: one.grad for name, one in module.named_parameters()}
        return self._log.found(gradients)
