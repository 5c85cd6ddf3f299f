"""Watches one step of a rank line by line, as the steps of check are watched."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ddp_equivalence.case.training import GradientKey
from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.observation import Observation, RowsRead
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.measurement.returned import DeclaredRows
from ddp_equivalence.observed_scripts.in_script.kept_tensors import unwrapped, with_real_files
from ddp_equivalence.observed_scripts.in_script.watch import SetUpCalls, Watch
from ddp_equivalence.observed_scripts.recorded_step import write_whole
from ddp_equivalence.observed_scripts.told import LookAt
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
        write_whole(folder / FILE, (with_real_files(_unscaled(found, scales)), operations))


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


# Logs the operations of one step of a script, on a rank or in one process, as ``check`` does.

MOST_OPERATIONS = 20_000
MOST_BYTES = 256 * 1024**2
"""Scripts train larger models than steps that are checked, and each is logged only once."""


class LoggedOperations:
    """Logs from now on."""

    def __init__(self) -> None:
        self._log = OperationLog(MOST_OPERATIONS, MOST_BYTES)
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
        found: Operations = with_real_files(self._log.found(gradients))
        return found
