"""A file without a name that a rank writes and the judging process reads: output, stacks.

It lives in memory where the system can do that: a full disk takes nothing from it, and whoever is
killed, and however, nothing stays behind.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from multiprocessing.connection import Connection


class Spool:
    """The reading side; ``end()`` is what travels to the rank."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("ddp_equivalence")
        else:
            with tempfile.TemporaryFile() as named:
                self._file = os.dup(named.fileno())
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)

    def end(self) -> Connection:
        """The writing side, in the one form in which descriptors travel to a forked process."""
        return Connection(os.dup(self._file), readable=False)

    def size(self) -> int:
        """Bytes written since it was last emptied."""
        return os.fstat(self._file).st_size

    def read(self, start: int = 0, most: int = 2**20) -> str:
        """What was written from ``start`` on; the last ``most`` bytes of it."""
        size = self.size()
        start = max(start, size - most)
        return os.pread(self._file, size - start, start).decode(errors="replace")

    def empty(self) -> None:
        """Forget what was written."""
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Give the memory back once the rank has gone as well."""
        os.close(self._file)
