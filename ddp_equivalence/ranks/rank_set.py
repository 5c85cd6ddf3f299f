"""A set of ranks: start them, submit work, collect what each sends, stop them.

Every wait watches the processes as well as the pipes and has a deadline, so that a rank that dies
or hangs is an entry in the result and never a hang of the run.
"""

from __future__ import annotations

import errno
import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch.multiprocessing as multiprocessing

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import messages, process_tree, root_cause, status_thread
from ddp_equivalence.ranks.capture_file import Spool
from ddp_equivalence.ranks.environment import OF_SET, group_environment
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.lanes import Lane, cuda_devices, visible_devices
from ddp_equivalence.ranks.process import Birth, Ends, main
from ddp_equivalence.ranks.server import own_main, start_server
from ddp_equivalence.report.wrapping import plural

START_DEADLINE = 120.0
"""Seconds until all ranks have joined their group; the first start imports torch."""

GRACE = 1.0
"""Seconds the other ranks get to tell their own story after the first failure."""

STOP_DEADLINE = 2.0
STACKS_DEADLINE, STACKS_DEADLINE_MORE = 0.5, 0.05
"""Seconds to tell where they are, for all ranks and for each of them."""

SILENCE = 10.0
"""Seconds without a byte in the middle of a message, after which its sender hangs."""

OUTPUT_KEPT = 64 * 2**10
"""Bytes of a rank's output that are shown: the last ones."""

MOST_OUTPUT = 32 * 2**20
"""Bytes that a rank may write in one case, before it fills the memory of the machine."""

TICK = 0.25
"""Seconds between two looks at the output of ranks that are otherwise silent."""


class Ranks(Protocol):
    """Who starts ranks is separate from what they do; this is all that the rest relies on."""

    def start(self) -> None: ...

    def submit(self, work: bytes) -> None: ...

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]: ...

    def stop(self) -> None: ...


class RankSet:
    """The ranks of one layout on one lane, as processes of this host.

    ``broken`` turns True after any trouble; a broken set is only good for ``stop()``.
    ``changed``: rank -> what its last work changed in its process or left running.
    ``environment``: variables that the ranks' process groups begin with. ``devices``: the GPUs that
    they may use. ``method``: one of ``ranks.server.METHODS``.
    """

    def __init__(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        environment: tuple[tuple[str, str], ...] | None = None,
        devices: tuple[str, ...] | None = None,
        method: str = "forkserver",
    ) -> None:
        self.layout, self.lane = layout, lane
        self.devices = cuda_devices() if devices is None else devices
        self.broken = False
        self.changed: dict[int, tuple[str, ...]] = {}
        self._collective_timeout = collective_timeout
        self._method = method
        self._environment = group_environment() if environment is None else environment
        self._token = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._cleared = False
        self._processes: dict[int, Any] = {}
        self._connections: dict[int, Connection] = {}
        self._witnesses: dict[int, Connection] = {}
        self._outputs: dict[int, Spool] = {}
        self._stacks: dict[int, Spool] = {}

    def start(self) -> None:
        """Start all processes and join them to one group.

        Raises RankFailed or RanksTimedOut; OSError if the system has no room for more.
        """
        if self._method == "forkserver":
            start_server()
        with own_main():
            for row in self._processes_of():
                self._give_birth(self._birth(row))
        self._join()

    def _processes_of(self) -> Sequence[RankPlace]:
        """The ranks that are processes of their own."""
        return self.layout.rows

    def _birth(self, row: RankPlace) -> Birth:
        return Birth(
            row=row,
            lane=self.lane,
            visible=visible_devices(self.layout, self.lane, self.devices)[row.rank],
            environment=self._environment,
            start_timeout=START_DEADLINE,
            collective_timeout=self._collective_timeout,
            token=self._token,
        )

    def _give_birth(self, birth: Birth) -> None:
        context: Any = multiprocessing.get_context(self._method)
        rank = birth.row.rank
        self._outputs[rank] = Spool()
        self._stacks[rank] = Spool()
        self._connections[rank], theirs = context.Pipe()
        messages.give_up_after(self._connections[rank], min(SILENCE, self._collective_timeout))
        self._witnesses[rank], answers = context.Pipe()
        ends = Ends(theirs, answers, self._outputs[rank].end(), self._stacks[rank].end())
        try:
            process = context.Process(target=main, args=(birth, ends), daemon=True)
            process.start()
            self._processes[rank] = process
        except EOFError as error:
            raise OSError(errno.EAGAIN, "the fork server has ended (no more processes?)") from error
        finally:
            for end in (ends.work, ends.witness, ends.output, ends.stacks):
                end.close()

    def _join(self) -> None:
        """Wait until all ranks have joined one group; the store's port goes from rank 0 to all."""
        deadline = time.monotonic() + START_DEADLINE
        within = f"within the {START_DEADLINE:g} s they have to start"
        for rank, kind, payload in self._listen({messages.READY}, deadline, within):
            if kind == messages.PORT and rank == 0:
                self._tell_port(payload)

    def _tell_port(self, port: int) -> None:
        for connection in self._connections.values():
            messages.send(connection, messages.PORT, port)

    def submit(self, work: bytes) -> None:
        """Hand the same work (made by ``carry.dumps``) to every rank."""
        self.changed = {}
        for output in self._outputs.values():
            if output.size():
                output.empty()
        for connection in self._connections.values():
            with suppress(OSError):  # a rank that is gone is found, and told of, by collect()
                messages.send(connection, messages.WORK, work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Yield (rank, result) as results arrive, until every rank has finished.

        ``deadline`` in seconds from now. Raises RankFailed or RanksTimedOut, with an entry for
        every rank; the set is then broken, and its processes are gone.
        """
        until = time.monotonic() + deadline
        issued: dict[int, int] = {}
        within = f"within the {deadline:.3g} s of the deadline"
        for rank, kind, payload in self._listen({messages.FINISHED}, until, within):
            results = payload
            if kind == messages.FINISHED:
                results = payload.results
                if payload.changed or payload.running:
                    self.changed[rank] = payload.changed + payload.running
                if payload.running or not payload.same_groups:
                    self.broken = True  # this work is done, the next is for others
                if payload.issued is not None:
                    issued[rank] = payload.issued
            for result in results:
                yield rank, result
        for rank, count in issued.items():
            if alone := count - min(issued.values()):
                # Nobody waits for them in this work; the next would meet them.
                what = f"{alone} {plural(alone, 'collective')} that other ranks do not call"
                self.changed[rank] = (*self.changed.get(rank, ()), what)
                self.broken = True

    def is_alive(self) -> bool:
        """True if every rank is still there."""
        return all(process.is_alive() for process in self._processes.values())

    def output(self, rank: int) -> str:
        """What the rank printed since its last work was submitted; the end of it, if much."""
        return self._outputs[rank].read(most=OUTPUT_KEPT) if rank in self._outputs else ""

    def end(self, rank: int, kind: str, what: str = "", **more: Any) -> RankEnd:
        """The entry of one rank."""
        row = self.layout.rows[rank]
        return RankEnd(rank, row.node, row.local_rank, kind, what, output=self.output(rank), **more)

    def stop(self) -> None:
        """End every process, gently first."""
        if not self.broken:
            for connection in self._connections.values():
                with suppress(OSError):
                    messages.send(connection, messages.STOP)
            until = time.monotonic() + STOP_DEADLINE
            for process in self._processes.values():
                process.join(max(0.0, until - time.monotonic()))
        self._kill()
        for connection in (*self._connections.values(), *self._witnesses.values()):
            connection.close()
        for process in self._processes.values():
            with suppress(ValueError):  # one that not even SIGKILL has ended
                process.close()
        for spool in (*self._outputs.values(), *self._stacks.values()):
            spool.close()

    def _listen(
        self, final: set[str], until: float, deadline: str
    ) -> Iterator[tuple[int, str, Any]]:
        """Yield (rank, kind, payload) until each rank has sent a final message."""
        ends: dict[int, RankEnd] = {}
        waiting = dict(self._connections)
        complete = False
        try:
            while waiting:
                if not self._wait(waiting, until):
                    raise self._trouble(ends, waiting, deadline)
                for rank in list(waiting):
                    message, end = self._news(rank)
                    if message is not None:
                        kind, payload = message
                        if kind == messages.RAISED:
                            end = self._exception(rank, payload)
                        else:
                            yield rank, kind, payload
                            end = self._finished(rank) if kind in final else None
                    if end is not None:
                        ends[rank] = end
                        del waiting[rank]
                        if end.failed and time.monotonic() + GRACE < until:
                            until = time.monotonic() + GRACE
                            deadline = f"within {GRACE:g} s of the first failure"
            if any(end.failed for end in ends.values()):
                raise self._trouble(ends, waiting, deadline)
            complete = True
        finally:
            if not complete:
                self.broken = True
                self._kill()

    def _news(self, rank: int) -> tuple[tuple[str, Any] | None, RankEnd | None]:
        """A message from the rank, or its end if it can send none any more, or neither."""
        connection = self._connections[rank]
        try:
            if connection.poll():
                return messages.receive(connection), None
            if self._outputs[rank].size() > MOST_OUTPUT:
                return None, self._silenced(rank)
            if self._processes[rank].is_alive() or connection.poll():
                return None, None
        except BlockingIOError:
            return None, self._running([rank])[rank]
        except (EOFError, OSError):
            pass
        return None, self._death(rank)

    def _wait(self, waiting: dict[int, Connection], until: float) -> bool:
        """Wait for news from these ranks; False once the time is over."""
        watched = [*waiting.values(), *(self._processes[rank].sentinel for rank in waiting)]
        while (left := until - time.monotonic()) > 0:
            if wait(watched, min(left, TICK)):
                return True
            if any(self._outputs[rank].size() > MOST_OUTPUT for rank in waiting):
                return True
        return False

    def _trouble(
        self, ends: dict[int, RankEnd], waiting: dict[int, Connection], deadline: str
    ) -> RankFailed:
        """The error for what happened: the root cause first, then its consequences."""
        running = self._running(list(waiting))
        for rank, end in running.items():
            if root_cause.is_telling(end.detail):  # it needs a moment to read the source lines
                running[rank] = self._told(rank) or end
        return root_cause.failure((ends | running).values(), deadline)

    def _told(self, rank: int) -> RankEnd | None:
        """The end of a rank that was about to say what it raised."""
        with suppress(OSError):
            self._connections[rank].poll(GRACE)
        message, end = self._news(rank)
        if message is not None and message[0] == messages.RAISED:
            end = self._exception(rank, message[1])
        return end

    def _running(self, ranks: Sequence[int]) -> dict[int, RankEnd]:
        """The entries of ranks that have not come back: where they are, and in which collective."""
        stopped = [rank for rank in ranks if process_tree.is_stopped(self._processes[rank].pid)]
        able = [rank for rank in ranks if rank not in stopped]
        stacks = self._stacks_of(able)
        seconds = STACKS_DEADLINE + STACKS_DEADLINE_MORE * len(able)
        last = status_thread.ask({rank: self._witnesses[rank] for rank in able}, seconds)
        stacks |= {rank: self._stacks[rank].read() or stacks[rank] for rank in able}  # in full
        ends = {}
        for rank in ranks:
            line, in_torch = root_cause.innermost(stacks.get(rank, ""))
            ends[rank] = self.end(
                rank,
                "running",
                "is stopped by a signal (SIGSTOP?)" if rank in stopped else "still running",
                detail=stacks.get(rank, ""),
                line=line,
                at=time.monotonic(),
                last=last.get(rank),
                waits=in_torch and last.get(rank) is not None,
            )
        return ends

    def _stacks_of(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            self._stacks[rank].empty()
            with suppress(OSError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        until = time.monotonic() + STACKS_DEADLINE + STACKS_DEADLINE_MORE * len(ranks)
        found = dict.fromkeys(ranks, "")
        while time.monotonic() < until and not all(found.values()):
            time.sleep(0.02)
            found = {rank: self._stacks[rank].read() for rank in ranks}
        return {rank: stack or "(it gave no stack)" for rank, stack in found.items()}

    def _death(self, rank: int) -> RankEnd:
        process = self._processes[rank]
        process.join(GRACE)
        code, at = process.exitcode, time.monotonic()
        if code is not None and code < 0:
            what = f"killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                what += " (out of memory? see the kernel's log)"
            waits = -code == signal.SIGABRT and root_cause.WATCHDOG in self.output(rank)
            if waits:
                what += f" by NCCL's watchdog: {root_cause.NOT_IN_TIME}"
            return self.end(rank, "signal", what, at=at, waits=waits)
        if code is None:
            return self.end(rank, "exit", "closed its connection and lives on", at=at)
        return self.end(rank, "exit", f"ended without a result, exit code {code}", at=at)

    def _silenced(self, rank: int) -> RankEnd:
        size = self._outputs[rank].size() / 2**20
        what = f"wrote {size:.0f} MiB of output, where {MOST_OUTPUT / 2**20:.0f} MiB are the limit"
        return self.end(rank, "output", what, at=time.monotonic())

    def _exception(self, rank: int, raised: messages.Raised) -> RankEnd:
        waits = raised.last is not None and root_cause.was_left_waiting(raised.what)
        return self.end(
            rank,
            "exception",
            raised.what,
            detail=raised.traceback,
            line=raised.line,
            at=raised.at,
            last=raised.last,
            waits=waits,
        )

    def _finished(self, rank: int) -> RankEnd:
        if self._outputs[rank].size() > MOST_OUTPUT:
            return self._silenced(rank)
        return self.end(rank, "finished", at=time.monotonic())

    def _kill(self) -> None:
        alive = [process for process in self._processes.values() if process.is_alive()]
        if self._cleared or (not alive and not self.broken):
            return
        self._cleared = True
        # What the ranks have started, too, wherever it has gone since.
        below = [pid for process in alive for pid in process_tree.descendants(process.pid)]
        for process in alive:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process_tree.kill([process.pid for process in alive])
        for process in self._processes.values():
            process.join(STOP_DEADLINE)
        process_tree.kill([*below, *process_tree.with_variable(OF_SET, self._token)])
