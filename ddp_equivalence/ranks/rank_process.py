"""One rank as the judging process sees it: its process, two pipes and two files."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as multiprocessing

from ddp_equivalence.case.layouts import RankPlace
from ddp_equivalence.ranks import messages, process, process_tree
from ddp_equivalence.ranks.collectives import LastCollective
from ddp_equivalence.ranks.failure import RankEnd
from ddp_equivalence.ranks.process import Channels, StartArguments, main

MAX_SILENCE = 10.0
"""If no byte comes for this many seconds in the middle of a message, its sender counts as hung."""

SHOWN_OUTPUT = 64 * 2**10
"""A report shows at most this many bytes of a rank's output, the last ones."""

MAX_OUTPUT = 32 * 2**20
"""Bytes that a rank may write in one case; more would fill the memory of the machine."""


class RankProcess:
    """One rank. ``process`` is None until ``start()`` has succeeded.

    ``connection`` carries work and results, ``status_connection`` the status thread's requests and
    answers. The rank writes everything that it prints to ``output_file``, and its stacks, when
    asked, to ``stacks_file``.
    """

    def __init__(self, row: RankPlace, method: str) -> None:
        self.row = row
        self.process: Any = None
        self._context: Any = multiprocessing.get_context(method)
        with ExitStack() as opened:
            self.output_file = CaptureFile()
            opened.callback(self.output_file.close)
            self.stacks_file = CaptureFile()
            opened.callback(self.stacks_file.close)
            self._opened = opened.pop_all()
        self.connection: Connection
        self.status_connection: Connection

    def start(self, arguments: StartArguments) -> None:
        """Start the process. Raises OSError if the system cannot start another process."""
        with ExitStack() as rank_sides:
            self.connection, work = self._pipe(rank_sides)
            messages.set_timeout(self.connection, min(MAX_SILENCE, arguments.collective_timeout))
            self.status_connection, status = self._pipe(rank_sides)
            output = rank_sides.enter_context(self.output_file.writer())
            stacks = rank_sides.enter_context(self.stacks_file.writer())
            channels = Channels(work, status, output, stacks)
            process = self._context.Process(target=main, args=(arguments, channels), daemon=True)
            try:
                with process_tree.children_allowed():
                    process.start()
            except EOFError as error:
                what = "the fork server has ended (too many processes?)"
                raise OSError(errno.EAGAIN, what) from error
            self.process = process

    def _pipe(self, rank_sides: ExitStack) -> tuple[Connection, Connection]:
        own_side, rank_side = self._context.Pipe()
        self._opened.callback(own_side.close)
        return own_side, rank_sides.enter_context(rank_side)

    def is_alive(self) -> bool:
        """True if the process still runs."""
        return self.process is not None and bool(self.process.is_alive())

    def output(self) -> str:
        """The output since the last work was submitted, or its last part if it is long."""
        return self.output_file.read(SHOWN_OUTPUT)

    def end(self, kind: str, what: str = "", **fields: Any) -> RankEnd:
        """How the rank ended, with these fields and its output, now unless ``at`` is given."""
        place = self.row.rank, self.row.node, self.row.local_rank
        given: dict[str, Any] = {"at": time.monotonic(), "output": self.output()} | fields
        return RankEnd(*place, kind, what, **given)

    def wrote_too_much(self) -> bool:
        """True if the rank has written more than ``MAX_OUTPUT``."""
        return self.output_file.size() > MAX_OUTPUT

    def request_stack(self) -> None:
        """Send SIGUSR1, on which the rank's faulthandler writes its stacks to ``stacks_file``."""
        self.stacks_file.clear()
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the process and its process group."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(OSError):
            os.kill(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close pipes and files."""
        self._opened.close()
        if self.process is not None:
            with suppress(ValueError):  # not even SIGKILL has ended it
                self.process.close()


# A file without a name that a rank writes to and the judging process reads.
#
# It receives the rank's output or its stacks. On Linux the file lives in memory: a full disk does
# not matter, and nothing is left behind, however the processes are killed.


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


# Describes how a rank ended its work, as a RankEnd: one function for each way to end.

EXIT_TIMEOUT = 1.0
"""Seconds to wait for the exit code of a process that has closed its connection."""

STATUS_TIMEOUT, STATUS_TIMEOUT_PER_RANK = 0.5, 0.05
"""Seconds to wait for the ranks' stacks, and then again for their last collectives.

The time is the first number, plus the second one for every rank.
"""


def finished(rank: RankProcess) -> RankEnd:
    """The rank has finished its work."""
    if rank.wrote_too_much():
        return wrote_too_much(rank)
    return rank.end("finished")


def wrote_too_much(rank: RankProcess) -> RankEnd:
    """The rank has written more output than it may."""
    size = rank.output_file.size() / 2**20
    what = f"wrote {size:.0f} MiB of output; the limit is {MAX_OUTPUT / 2**20:.0f} MiB"
    return rank.end("output", what)


def died(rank: RankProcess) -> RankEnd:
    """The rank's process has ended, or has closed its connection, without a last message."""
    rank.process.join(EXIT_TIMEOUT)
    code = rank.process.exitcode
    if code is None:
        return rank.end("exit", "closed its connection, but its process still runs")
    if code >= 0:
        return rank.end("exit", f"ended without a result, exit code {code}")
    what = f"killed by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        what += " (out of memory? see the kernel's log)"
    by_watchdog = -code == signal.SIGABRT and messages.WATCHDOG in rank.output()
    if by_watchdog:
        what += f" by NCCL's watchdog: {messages.COLLECTIVE_TIMED_OUT}"
    return rank.end("signal", what, waits=by_watchdog, signal_number=-code)


def still_running(ranks: Iterable[RankProcess]) -> dict[int, RankEnd]:
    """For ranks that did not finish in time: where each of them is, and in which collective."""
    by_rank = {rank.row.rank: rank for rank in ranks}
    stopped = [r for r, rank in by_rank.items() if process_tree.is_stopped(rank.process.pid)]
    responsive = {r: rank for r, rank in by_rank.items() if r not in stopped}
    stacks = _stacks(list(responsive.values()))
    seconds = STATUS_TIMEOUT + STATUS_TIMEOUT_PER_RANK * len(responsive)
    connections = {r: rank.status_connection for r, rank in responsive.items()}
    last = process.ask(connections, seconds)
    # Meanwhile the ranks have had time to write the rest of their stacks.
    stacks |= {r: rank.stacks_file.read() or stacks[r] for r, rank in responsive.items()}
    return {
        r: _running_end(rank, r in stopped, stacks.get(r, ""), last.get(r))
        for r, rank in by_rank.items()
    }


def _running_end(
    rank: RankProcess, stopped: bool, stack: str, collective: LastCollective | None
) -> RankEnd:
    line, function = messages.innermost_line(stack)
    if collective is not None and function in POINT_TO_POINT:  # torch 2.13 does not record these
        collective = LastCollective(0, collective.group, function, (), (), "", collective.at)
    return rank.end(
        "running",
        "is stopped by a signal (SIGSTOP?)" if stopped else "still running",
        detail=stack,
        line=line,
        last=collective,
        waits=bool(function) and collective is not None,
    )


POINT_TO_POINT = {"send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv"}


def _stacks(ranks: Sequence[RankProcess]) -> dict[int, str]:
    """The stack of each rank, as far as it has written it."""
    for one in ranks:
        one.request_stack()
    until = time.monotonic() + STATUS_TIMEOUT + STATUS_TIMEOUT_PER_RANK * len(ranks)
    stacks = {rank.row.rank: "" for rank in ranks}
    while time.monotonic() < until and not all(stacks.values()):
        time.sleep(0.02)
        stacks = {rank.row.rank: rank.stacks_file.read() for rank in ranks}
    return {
        number: stack or "(the rank did not write its stack)" for number, stack in stacks.items()
    }
