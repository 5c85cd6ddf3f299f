"""Logs the operations of one step of a script, on a rank or in one process, as ``check`` does."""

from __future__ import annotations

import pickle
from pathlib import Path

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.observed_scripts.in_script.real_files import with_real_files

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

    def write(self, path: Path, module: nn.Module) -> None:
        """Write what was logged, to be read by the process that has started the script.
        ``module``: the one whose gradients are compared.
        """
        gradients = {name: one.grad for name, one in module.named_parameters()}
        path.write_bytes(pickle.dumps(with_real_files(self._log.found(gradients))))
