"""A set of ranks: start them, submit work, collect what each sends, stop them.

Every wait watches the processes as well as the pipes and has a deadline, so that a rank that dies
or hangs is an entry in the result and never a hang of the run.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch.multiprocessing as multiprocessing

from ddp_equivalence.errors import RankEnd, RankFailed, RanksTimedOut
from ddp_equivalence.layouts import Layout
from ddp_equivalence.ranks import messages
from ddp_equivalence.ranks.lanes import Lane, visible_devices
from ddp_equivalence.ranks.process import Birth, Raised, main
from ddp_equivalence.ranks.server import own_main, start_server

START_DEADLINE = 120.0
"""Seconds until all ranks have joined their group; the first start imports torch."""

GRACE = 1.0
"""Seconds the other ranks get to tell their own story after the first failure."""

STOP_DEADLINE = 2.0
OUTPUT_KEPT = 64 * 2**10
"""Bytes of a rank's output that are shown: the last ones."""

LEFT_BEHIND = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
TIMED_OUT = ("Timed out waiting", "timed out", "Watchdog caught collective operation timeout")
"""What gloo and NCCL say on the ranks that waited for another one."""


class Ranks(Protocol):
    """Who starts ranks is separate from what they do; this is all that the rest relies on."""

    def start(self) -> None: ...

    def submit(self, work: bytes) -> None: ...

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]: ...

    def stop(self) -> None: ...


class RankSet:
    """The ranks of one layout on one lane, as processes of this host.

    ``broken`` turns True after any trouble; a broken set is only good for ``stop()``.
    """

    def __init__(self, layout: Layout, lane: Lane, collective_timeout: float) -> None:
        self.layout, self.lane = layout, lane
        self.broken = False
        self._collective_timeout = collective_timeout
        self._outputs: list[BinaryIO] = []
        self._stack_files: list[BinaryIO] = []
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._read_from = [0] * layout.world_size

    def start(self) -> None:
        """Start all processes and join them to one group. Raises RankFailed or RanksTimedOut."""
        start_server()
        context = multiprocessing.get_context("forkserver")
        visible = visible_devices(self.layout, self.lane)
        # Once every rank has opened its files they lose their names: whoever is killed, and
        # however, nothing stays on the disk.
        with tempfile.TemporaryDirectory(prefix="ddp_equivalence-") as name, own_main():
            folder = Path(name)
            for row in self.layout.rows:
                ours, theirs = context.Pipe()
                birth = Birth(
                    row=row,
                    lane=self.lane,
                    visible=visible[row.rank],
                    output=folder / f"rank{row.rank}.out",
                    stacks=folder / f"rank{row.rank}.stacks",
                    collective_timeout=self._collective_timeout,
                )
                self._outputs.append(_opened(birth.output))
                self._stack_files.append(_opened(birth.stacks))
                process = context.Process(target=main, args=(birth, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            self._join()

    def _join(self) -> None:
        deadline = time.monotonic() + START_DEADLINE
        for rank, kind, payload in self._listen({messages.READY}, deadline, "start"):
            if kind == messages.PORT and rank == 0:
                for connection in self._connections:
                    messages.send(connection, messages.PORT, payload)

    def submit(self, work: bytes) -> None:
        """Hand the same work (made by ``carry.dumps``) to every rank."""
        self._read_from = [self._output_size(rank) for rank in range(self.layout.world_size)]
        for connection in self._connections:
            with suppress(OSError):  # a rank that is gone is found, and told of, by collect()
                messages.send(connection, messages.WORK, work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Yield (rank, result) as results arrive, until every rank has finished.

        ``deadline`` in seconds from now. Raises RankFailed or RanksTimedOut, with an entry for
        every rank; the set is then broken, and its processes are gone.
        """
        until = time.monotonic() + deadline
        for rank, kind, payload in self._listen({messages.FINISHED}, until, f"{deadline:g} s"):
            if kind == messages.RESULT:
                yield rank, payload
            elif kind == messages.FINISHED and not payload:
                self.broken = True  # its group is gone: this work is done, the next is for others

    def output(self, rank: int) -> str:
        """What the rank printed since its last work was submitted; the end of it, if much."""
        file = self._outputs[rank]
        file.seek(max(self._read_from[rank], self._output_size(rank) - OUTPUT_KEPT))
        return file.read().decode(errors="replace")

    def stop(self) -> None:
        """End every process, gently first."""
        if not self.broken:
            for connection in self._connections:
                with suppress(OSError):
                    messages.send(connection, messages.STOP)
            until = time.monotonic() + STOP_DEADLINE
            for process in self._processes:
                process.join(max(0.0, until - time.monotonic()))
        self._kill()
        for connection in self._connections:
            connection.close()
        for file in (*self._outputs, *self._stack_files):
            file.close()

    def _listen(self, final: set[str], until: float, what: str) -> Iterator[tuple[int, str, Any]]:
        """Yield (rank, kind, payload) until each rank has sent a final message."""
        ends: dict[int, RankEnd] = {}
        waiting = dict(enumerate(self._connections))
        complete = False
        try:
            while waiting:
                timeout = until - time.monotonic()
                if not self._wait(waiting, timeout):
                    raise self._trouble(ends, waiting, what)
                for rank, connection in list(waiting.items()):
                    try:
                        message = messages.receive(connection) if connection.poll() else None
                    except (EOFError, OSError):
                        message = None
                        ends[rank] = self._death(rank)
                    if message is None and rank not in ends:
                        if self._processes[rank].is_alive() or connection.poll():
                            continue
                        ends[rank] = self._death(rank)
                    elif message is not None:
                        kind, payload = message
                        yield rank, kind, payload
                        if kind in final:
                            ends[rank] = self._end(rank, "finished", at=time.monotonic())
                        elif kind == messages.RAISED:
                            ends[rank] = self._exception(rank, payload)
                        else:
                            continue
                    del waiting[rank]
                    if ends[rank].failed:
                        until = min(until, time.monotonic() + GRACE)
            if any(end.failed for end in ends.values()):
                raise self._trouble(ends, waiting, what)
            complete = True
        finally:
            if not complete:
                self.broken = True
                self._kill()

    def _wait(self, waiting: dict[int, Connection], timeout: float) -> bool:
        if timeout <= 0:
            return False
        sentinels = [self._processes[rank].sentinel for rank in waiting]
        return bool(wait([*waiting.values(), *sentinels], timeout))

    def _trouble(
        self, ends: dict[int, RankEnd], waiting: dict[int, Connection], what: str
    ) -> RankFailed:
        """The error for what happened: the root cause first, then its consequences."""
        stacks = self._stacks(waiting)
        for rank in waiting:
            ends[rank] = self._end(
                rank, "running", "still running", stacks[rank], _innermost(stacks[rank])
            )
        ordered = sorted(ends.values(), key=_cause_first)
        first = ordered[0]
        where = f"rank {first.rank} (node {first.node}, local rank {first.local_rank})"
        if first.kind == "running" or _says(first, TIMED_OUT):
            late = ", ".join(str(end.rank) for end in ordered if end.failed)
            return RanksTimedOut(f"ranks {late} did not come back ({what})", ordered)
        return RankFailed(f"{where}: {first.what}", ordered)

    def _stacks(self, waiting: dict[int, Connection]) -> dict[int, str]:
        for rank in waiting:
            with suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        found = dict.fromkeys(waiting, "")
        while waiting and time.monotonic() < until and not all(found.values()):
            time.sleep(0.05)
            for rank in waiting:
                self._stack_files[rank].seek(0)
                found[rank] = self._stack_files[rank].read().decode(errors="replace")
        return {rank: stack or "(no stack: stopped?)" for rank, stack in found.items()}

    def _death(self, rank: int) -> RankEnd:
        process = self._processes[rank]
        process.join(GRACE)
        code, at = process.exitcode, time.monotonic()
        if code is not None and code < 0:
            what = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                what += " (out of memory? see the kernel's log)"
            return self._end(rank, "signal", what, at=at)
        return self._end(rank, "exit", f"ended without a result, exit code {code}", at=at)

    def _exception(self, rank: int, raised: Raised) -> RankEnd:
        return self._end(
            rank, "exception", raised.what, raised.traceback, raised.line, at=raised.at
        )

    def _end(
        self,
        rank: int,
        kind: str,
        what: str = "",
        detail: str = "",
        line: str = "",
        at: float = 0.0,
    ) -> RankEnd:
        row = self.layout.rows[rank]
        output = self.output(rank)
        return RankEnd(rank, row.node, row.local_rank, kind, what, detail, line, at, output)

    def _output_size(self, rank: int) -> int:
        return os.fstat(self._outputs[rank].fileno()).st_size

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                # The group, for what the rank itself has started.
                for kill in (os.killpg, os.kill):
                    with suppress(OSError):
                        kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join(STOP_DEADLINE)


def _cause_first(end: RankEnd) -> tuple[int, float]:
    """Deaths, then exceptions by time, then who never came, then who waited for it."""
    if end.kind == "exception":
        waited = _says(end, (*LEFT_BEHIND, *TIMED_OUT))
        return (3 if waited else 1), end.at
    return {"signal": 0, "exit": 0, "running": 2, "finished": 4}[end.kind], end.at


def _says(end: RankEnd, texts: tuple[str, ...]) -> bool:
    return end.kind == "exception" and any(text in end.what for text in texts)


def _innermost(stack: str) -> str:
    """The innermost line of a faulthandler stack that lies outside torch."""
    main_thread = stack.rpartition("(most recent call first)")[2]
    for line in main_thread.splitlines():
        if line.strip().startswith("File") and f"{os.sep}torch{os.sep}" not in line:
            return line.strip()
    return ""


def _opened(path: Path) -> BinaryIO:
    path.touch()
    return path.open("rb")
