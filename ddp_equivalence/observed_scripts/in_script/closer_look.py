"""Watches one step of a rank line by line, as the steps of check are watched."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ddp_equivalence.measurement.calls import Call, Operations
from ddp_equivalence.measurement.observation import Observation, RowsRead
from ddp_equivalence.measurement.observer import Observer
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.measurement.returned import DeclaredRows
from ddp_equivalence.observed_scripts.in_script.kept_tensors import unwrapped, with_real_files
from ddp_equivalence.observed_scripts.recorded_step import write_whole
from ddp_equivalence.observed_scripts.told import LookAt
from ddp_equivalence.ranks.collectives import (
    new_collectives,
    trust_recorder_that_has_entries,
    watch_handles,
)

if TYPE_CHECKING:
    from ddp_equivalence.observed_scripts.in_script.watch import Watch

FILE = "closer_look.pt"
"""Holds an ``Observation`` and, if they were logged, ``Operations``."""


class CloserLook:
    """``look_at``: what to watch. ``rank``: the rank that this process is."""

    def __init__(self, look_at: LookAt, rank: int) -> None:
        self._look_at = look_at
        self._rank = rank
        self._observer: Observer | None = None
        self._operations: LoggedOperations | None = None
        self._open = ExitStack()

    def begin(
        self,
        module: nn.Module,
        watch: Watch,
        set_up: Sequence[Call],
        operations: LoggedOperations | None,
    ) -> None:
        """Watch from here on. The user's functions that are running now are followed too.

        ``set_up``: calls that were made before, beside those that ``watch`` knows of.
        ``operations``: a log that has begun with the step's first batch.
        """
        rows = _RowsOfCalls(self._look_at.rows[self._rank])
        declared = DeclaredRows([()])
        kept = self._look_at.sample
        observer = Observer(module, rows, declared, kept, inside_model=True)  # type: ignore[arg-type]
        rows.observer = observer
        self._observer = observer
        watch_handles()  # so that the observer is told of collectives
        trust_recorder_that_has_entries()
        new_collectives()  # those before are no evidence
        observer.was_set_up(set_up)
        self._open.enter_context(observer.watching(sys._getframe(1)))
        for ddp, lines in watch.wrapped:
            if unwrapped(ddp) is not module:
                continue
            off_at = None if ddp.require_backward_grad_sync else watch.no_sync_at
            observer.was_wrapped(ddp, lines, off_at)
        if self._look_at.operations:
            self._operations = operations or LoggedOperations.begun()
        self._module = module

    def end(
        self, gradients: Mapping[str, Tensor | None], scales: Sequence[float], folder: Path
    ) -> None:
        """Stop watching, and write what was seen. ``gradients``: those that are compared, without
        a loss scale. ``scales``: the loss scale of each backward pass.
        """
        assert self._observer is not None
        operations = self._operations and self._operations.stopped(self._module)
        self._open.close()
        found = self._observer.found(
            {(0, name): one for name, one in gradients.items()}, new_collectives()
        )
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
        self.observer: Observer | None = None

    def rows_of(self, arguments: object) -> RowsRead | None:
        """The rows of the big batch that this rank reads before its next backward pass."""
        assert self.observer is not None
        number = len(self.observer.backwards)
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
        """What was logged until now; None if the log cannot be ended. ``module``: the one whose
        gradients are compared.
        """
        if not self.stop():
            return None
        gradients = {name: one.grad for name, one in module.named_parameters()}
        found: Operations = with_real_files(self._log.found(gradients))
        return found
