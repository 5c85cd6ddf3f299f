"""Describes how a rank ended its work, as a RankEnd: one function for each way to end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any

from ddp_equivalence.ranks import messages, process_tree, root_cause, status_thread
from ddp_equivalence.ranks.collectives import LastCollective
from ddp_equivalence.ranks.failure import RankEnd
from ddp_equivalence.ranks.rank_process import MAX_OUTPUT, RankProcess

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
    return _end(rank, "finished")


def raised(rank: RankProcess, error: messages.Raised) -> RankEnd:
    """The rank has raised this exception."""
    return _end(
        rank,
        "exception",
        error.what,
        detail=error.traceback,
        line=error.line,
        at=error.at,
        last=error.last,
        waits=error.last is not None and root_cause.was_left_waiting(error.what),
    )


def wrote_too_much(rank: RankProcess) -> RankEnd:
    """The rank has written more output than it may."""
    size = rank.output_file.size() / 2**20
    what = f"wrote {size:.0f} MiB of output; the limit is {MAX_OUTPUT / 2**20:.0f} MiB"
    return _end(rank, "output", what)


def died(rank: RankProcess) -> RankEnd:
    """The rank's process has ended, or has closed its connection, without a last message."""
    rank.process.join(EXIT_TIMEOUT)
    code = rank.process.exitcode
    if code is None:
        return _end(rank, "exit", "closed its connection, but its process still runs")
    if code >= 0:
        return _end(rank, "exit", f"ended without a result, exit code {code}")
    what = f"killed by {signal.Signals(-code).name}"
    if -code == signal.SIGKILL:
        what += " (out of memory? see the kernel's log)"
    by_watchdog = -code == signal.SIGABRT and root_cause.WATCHDOG in rank.output()
    if by_watchdog:
        what += f" by NCCL's watchdog: {root_cause.COLLECTIVE_TIMED_OUT}"
    return _end(rank, "signal", what, waits=by_watchdog, signal_number=-code)


def still_running(ranks: Iterable[RankProcess]) -> dict[int, RankEnd]:
    """For ranks that did not finish in time: where each of them is, and in which collective."""
    by_rank = {rank.row.rank: rank for rank in ranks}
    stopped = [r for r, rank in by_rank.items() if process_tree.is_stopped(rank.process.pid)]
    responsive = {r: rank for r, rank in by_rank.items() if r not in stopped}
    stacks = _stacks(list(responsive.values()))
    seconds = STATUS_TIMEOUT + STATUS_TIMEOUT_PER_RANK * len(responsive)
    connections = {r: rank.status_connection for r, rank in responsive.items()}
    last = status_thread.ask(connections, seconds)
    # Meanwhile the ranks have had time to write the rest of their stacks.
    stacks |= {r: rank.stacks_file.read() or stacks[r] for r, rank in responsive.items()}
    return {
        r: _running_end(rank, r in stopped, stacks.get(r, ""), last.get(r))
        for r, rank in by_rank.items()
    }


def _running_end(
    rank: RankProcess, stopped: bool, stack: str, collective: LastCollective | None
) -> RankEnd:
    line, in_torch = root_cause.innermost_line(stack)
    return _end(
        rank,
        "running",
        "is stopped by a signal (SIGSTOP?)" if stopped else "still running",
        detail=stack,
        line=line,
        last=collective,
        waits=in_torch and collective is not None,
    )


def _stacks(ranks: Sequence[RankProcess]) -> dict[int, str]:
    """The stack of each rank, as far as it has written it."""
    for rank in ranks:
        rank.request_stack()
    until = time.monotonic() + STATUS_TIMEOUT + STATUS_TIMEOUT_PER_RANK * len(ranks)
    stacks = {rank.row.rank: "" for rank in ranks}
    while time.monotonic() < until and not all(stacks.values()):
        time.sleep(0.02)
        stacks = {rank.row.rank: rank.stacks_file.read() for rank in ranks}
    return {
        number: stack or "(the rank did not write its stack)" for number, stack in stacks.items()
    }


def _end(rank: RankProcess, kind: str, what: str = "", **fields: Any) -> RankEnd:
    """The RankEnd with these fields; ``at`` is now unless it is given."""
    return RankEnd(
        rank=rank.row.rank,
        node=rank.row.node,
        local_rank=rank.row.local_rank,
        kind=kind,
        what=what,
        output=rank.output(),
        **({"at": time.monotonic()} | fields),
    )
