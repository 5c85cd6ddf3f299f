"""Listens to all ranks at once until each of them has sent its last message.

Every wait has a deadline, and watches the processes as well as the pipes. A rank that dies or hangs
therefore becomes part of an error and never makes the run hang.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from ddp_equivalence.ranks import messages, rank_ends, root_cause
from ddp_equivalence.ranks.deadline import Deadline
from ddp_equivalence.ranks.exception_text import is_describing_exception
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.rank_process import RankProcess

GRACE = 1.0
"""Seconds that the other ranks get after the first failure, to report what happened to them."""

POLL_INTERVAL = 0.25
"""Seconds between two checks of how much output the ranks have written."""


def listen(
    ranks: Mapping[int, RankProcess], last_message: str, deadline: Deadline
) -> Iterator[tuple[int, str, Any]]:
    """Yield (rank, kind, payload) of every message, until each rank has sent ``last_message``.

    Raises RankFailed, or RanksTimedOut at the deadline.
    """
    ends: dict[int, RankEnd] = {}
    waiting = dict(ranks)
    while waiting:
        ready = _wait(waiting, deadline)
        if not ready:
            raise _failure(ends, waiting, deadline.within)
        for number, rank in ready.items():
            message, end = _next_message(rank)
            if message is not None:
                kind, payload = message
                if kind == messages.RAISED:
                    end = rank_ends.raised(rank, payload)
                else:
                    yield number, kind, payload
                    end = rank_ends.finished(rank) if kind == last_message else None
            if end is not None:
                ends[number] = end
                del waiting[number]
                if end.failed and deadline.left() > GRACE:
                    grace = f"within {GRACE:g} s of the first failure"
                    deadline = Deadline(time.monotonic() + GRACE, grace)
    if any(end.failed for end in ends.values()):
        raise _failure(ends, waiting, deadline.within)


def _wait(waiting: Mapping[int, RankProcess], deadline: Deadline) -> dict[int, RankProcess]:
    """Wait until ranks have sent a message, ended, or printed too much; {} at the deadline."""
    watched = [rank.connection for rank in waiting.values()]
    watched += [rank.process.sentinel for rank in waiting.values()]
    while (left := deadline.left()) > 0:
        heard_of = wait(watched, min(left, POLL_INTERVAL))
        ready = {
            number: rank
            for number, rank in waiting.items()
            if rank.connection in heard_of
            or rank.process.sentinel in heard_of
            or rank.wrote_too_much()
        }
        if ready:
            return ready
    return {}


def _next_message(rank: RankProcess) -> tuple[tuple[str, Any] | None, RankEnd | None]:
    """(message, None) if the rank has sent a message, (None, end) if it can send no more.

    (None, None) if the rank still works and has sent no new message.
    """
    try:
        if rank.connection.poll():
            return messages.receive(rank.connection), None
        if rank.wrote_too_much():
            return None, rank_ends.wrote_too_much(rank)
        if rank.is_alive() or rank.connection.poll():
            return None, None
    except BlockingIOError:  # it hangs in the middle of a message
        return None, rank_ends.still_running([rank])[rank.row.rank]
    except (EOFError, OSError):
        pass
    return None, rank_ends.died(rank)


def _failure(
    ends: Mapping[int, RankEnd], waiting: Mapping[int, RankProcess], deadline: str
) -> RankFailed:
    """The error, with the end of every rank. Ranks in ``waiting`` are asked where they are."""
    running = rank_ends.still_running(waiting.values())
    for number, end in running.items():
        # Such a rank has raised, and needs a moment to read the source lines of its traceback.
        if is_describing_exception(end.detail):
            running[number] = _wait_for_exception(waiting[number]) or end
    return root_cause.failure({**ends, **running}.values(), deadline)


def _wait_for_exception(rank: RankProcess) -> RankEnd | None:
    """Wait for a rank that is about to report what it has raised."""
    with suppress(OSError):
        rank.connection.poll(GRACE)
    message, end = _next_message(rank)
    if message is not None and message[0] == messages.RAISED:
        end = rank_ends.raised(rank, message[1])
    return end
