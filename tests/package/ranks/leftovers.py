"""What a run leaves behind: processes that bear its mark, files in its temporary folder."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

MARK = "DDP_EQUIVALENCE_TESTED_RUN"
"""In the environment of a run, and so in that of every process that it starts."""

PATIENCE = 60.0
"""Seconds in which everything has to be gone: the fork server first imports torch to its end."""

OF_TORCH = "torchinductor_"
"""Beginning of the name of an empty folder that importing ``torch._dynamo`` makes."""


@dataclass(frozen=True)
class Place:
    """Where a run takes place: its folder, its temporary folder, and the mark on its processes."""

    folder: Path
    temporary: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        return {MARK: self.mark, "TMPDIR": str(self.temporary), "NEWS": str(self.folder / "news")}

    def news(self) -> str:
        """What the run's tests have told so far, a line each."""
        path = self.folder / "news"
        return path.read_text() if path.exists() else ""

    def left(self) -> list[str]:
        """The run's processes that live on, and its files, once it had time to end them."""
        return [*self.lives(), *self._files()]

    def lives(self) -> list[str]:
        """The run's processes that live on."""
        until = time.monotonic() + PATIENCE
        while (found := [*self._commands()]) and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def processes(self) -> Iterator[int]:
        """The run's processes; one that has ended has no environment, and is none."""
        marked = f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if marked in entry.read_bytes().split(b"\0"):
                    yield int(entry.parent.name)

    def _commands(self) -> Iterator[str]:
        for pid in self.processes():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                yield f"process {pid}: {command.decode()[:120]}"

    def _files(self) -> Iterator[str]:
        for path in self.temporary.rglob("*"):
            if not (path.name.startswith(OF_TORCH) and not any(path.iterdir())):
                yield str(path)


@contextmanager
def place(folder: Path) -> Iterator[Place]:
    """A place whose processes are ended afterwards, whatever a test found."""
    # Not below the test's own folder: the name of a socket has at most 107 characters.
    with TemporaryDirectory() as temporary:
        here = Place(folder, Path(temporary))
        try:
            yield here
        finally:
            for pid in here.processes():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
