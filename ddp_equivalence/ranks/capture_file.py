"""A file without a name that a rank writes to and the judging process reads.

It receives the rank's output or its stacks. On Linux the file lives in memory: a full disk does not
matter, and nothing is left behind, however the processes are killed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from multiprocessing.connection import Connection


class CaptureFile:
    """The judging process's side of the file; ``writer()`` makes the rank's side."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("ddp_equivalence")
        else:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, os.O_APPEND)

    def writer(self) -> Connection:
        """The rank's side: a Connection, since multiprocessing hands those to a forked process."""
        return Connection(os.dup(self._descriptor), readable=False)

    def size(self) -> int:
        """The number of bytes written since the file was last cleared."""
        return os.fstat(self._descriptor).st_size

    def read(self, max_bytes: int = 2**20) -> str:
        """The last ``max_bytes`` bytes that were written."""
        size = self.size()
        start = max(0, size - max_bytes)
        return os.pread(self._descriptor, size - start, start).decode(errors="replace")

    def clear(self) -> None:
        """Delete everything that was written so far."""
        os.ftruncate(self._descriptor, 0)

    def close(self) -> None:
        """Close this side; the memory is freed once the rank has ended as well."""
        os.close(self._descriptor)
