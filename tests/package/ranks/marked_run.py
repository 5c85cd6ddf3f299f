"""A run of pytest whose processes and files can be recognised, to see what it leaves behind."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

import psutil

MARK_VARIABLE = "DDP_EQUIVALENCE_TESTED_RUN"
"""Set in the environment of the run, and so in that of every process that it starts."""

CLEANUP_TIMEOUT = 60.0
"""Seconds in which everything must be gone: the fork server first completes its import of torch."""

TORCH_FOLDER = "torchinductor_"
"""The name of an empty folder that importing ``torch._dynamo`` makes begins like this."""


@dataclass(frozen=True)
class MarkedRun:
    """``folder``: the working folder of the run. ``temporary``: its folder for temporary files."""

    folder: Path
    temporary: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        events = str(self.folder / "events")
        return {MARK_VARIABLE: self.mark, "TMPDIR": str(self.temporary), "EVENTS": events}

    def events(self) -> list[str]:
        """What the tests of the run have reported so far."""
        path = self.folder / "events"
        return path.read_text().splitlines() if path.exists() else []

    def left_behind(self) -> list[str]:
        """The processes and files that are left after the run had time to end them."""
        return [*self.left_running(), *self._files()]

    def left_running(self) -> list[str]:
        """The processes that are left after the run had time to end them."""
        until = monotonic() + CLEANUP_TIMEOUT
        while (left := [*self._commands()]) and monotonic() < until:
            sleep(0.05)
        return left

    def processes(self) -> Iterator[psutil.Process]:
        """The processes of the run; one that has ended has no environment and is not among them."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK_VARIABLE) == self.mark:
                    yield process

    def _commands(self) -> Iterator[str]:
        for process in self.processes():
            with suppress(psutil.Error):
                yield f"process {process.pid}: {' '.join(process.cmdline())[:120]}"

    def _files(self) -> Iterator[str]:
        for path in self.temporary.rglob("*"):
            if not (path.name.startswith(TORCH_FOLDER) and not any(path.iterdir())):
                yield str(path)


@contextmanager
def marked_run(folder: Path) -> Iterator[MarkedRun]:
    """A run in this folder, whose processes are killed at the end of the block."""
    # The temporary folder is not below the test's own: a socket's name has at most 107 characters.
    with TemporaryDirectory() as temporary:
        run = MarkedRun(folder, Path(temporary))
        try:
            yield run
        finally:
            for process in run.processes():
                with suppress(psutil.Error):
                    process.kill()
