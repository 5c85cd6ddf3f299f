"""How ranks end their work: the messages, the errors, and which rank caused a failure."""

from __future__ import annotations

import os
import pickle
import re
import socket
import struct
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddp_equivalence.ranks.collectives import last_collective
from ddp_equivalence.ranks.ddp_errors import PLACE, ddp_error, is_users, text_of_line
from ddp_equivalence.ranks.failure import RankEnd, RankFailed, RanksTimedOut

# The messages between the judging process and a rank.
#
# Large arrays are sent after the pickle, straight from their memory, so that nothing copies them.

READY, PORT, WORK, STOP = "ready", "port", "work", "stop"
RESULTS, FINISHED, RAISED = "results", "finished", "raised"

SMALL_ARRAY = 4096
"""Arrays of at most this many bytes go into the pickle: a message of their own would cost more."""


@dataclass(frozen=True)
class Finished:
    """The last message of a rank about its work: the last results, and what the work left behind.

    ``can_go_on``: the rank is as before, perhaps after it has restored what the work changed.
    ``changed``: this as phrases, and the threads and processes that the work left running.
    ``not_compared``: the user's modules that the work imported and the caller had not compared.
    ``issued``: the number of collectives of the default group that the rank has issued since it
    started, or None if it is not known. ``libraries``: those that any work has imported so far.
    ``cpu_seconds``: processor time of the work, of all its threads.
    """

    results: list[object]
    can_go_on: bool
    changed: tuple[str, ...]
    not_compared: tuple[str, ...]
    issued: int | None
    libraries: tuple[str, ...]
    cpu_seconds: float


def set_timeout(connection: Connection, seconds: float) -> None:
    """Let a read or a write raise BlockingIOError if no byte gets through for this time.

    That happens if the other process is stopped, or hangs, in the middle of a message.
    """
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, direction, limit)


def send(connection: Connection, kind: str, payload: object = None) -> None:
    """Send one message. Raises OSError if the other process is gone."""
    large_arrays: list[memoryview] = []

    def goes_into_pickle(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > SMALL_ARRAY:
            large_arrays.append(view)
        return view.nbytes <= SMALL_ARRAY

    body = pickle.dumps((kind, payload), protocol=5, buffer_callback=goes_into_pickle)
    connection.send_bytes(pickle.dumps((body, [view.nbytes for view in large_arrays])))
    for view in large_arrays:
        connection.send_bytes(view)


def receive(connection: Connection) -> tuple[str, Any]:
    """Wait for one message and return (kind, payload).

    Raises EOFError or OSError if the other process is gone.
    """
    body, sizes = pickle.loads(connection.recv_bytes())
    large_arrays = []
    for size in sizes:
        array = bytearray(size)
        connection.recv_bytes_into(array)
        large_arrays.append(array)
    kind, payload = pickle.loads(body, buffers=large_arrays)
    return kind, payload


# Describes an exception on a rank as text that can be sent to the judging process.

PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"


def describe_exception(error: BaseException) -> dict[str, Any]:
    """The fields of a RankEnd for an exception, as text: it may not be picklable itself.

    ``line``: the innermost line of the user's code, or else outside torch.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    places = [(frame.f_code.co_filename, number) for frame, number in frames]
    what = "".join(traceback.format_exception_only(error)).strip()
    places += [(file, int(number)) for file, number in IN_WORKER.findall(what)]
    outside = [place for place in places if not _is_torch(place[0])]
    users = [place for place in outside if is_users(place[0])]
    line = next((text_of_line(*place) for place in reversed(users or outside)), "")
    last = last_collective()
    return {
        "kind": "exception",
        "what": what,
        "detail": "".join(_from_the_users_code(error).format()),
        "line": line,
        "at": time.monotonic(),
        "last": last,
        "waits": last is not None and was_left_waiting(what),
        "about": ddp_error(what, frames),
    }


IN_WORKER = re.compile(r'^ +File "(.+)", line (\d+), in .+$', re.MULTILINE)
"""The frames in the text of an error that torch hands on from a worker of a loader."""


def _from_the_users_code(error: BaseException) -> traceback.TracebackException:
    """The traceback without the frames of this package that led to the user's code."""
    described = traceback.TracebackException.from_exception(error)
    frames = list(described.stack)
    while frames and frames[0].filename.startswith(PACKAGE):
        frames.pop(0)
    if frames:
        described.stack = traceback.StackSummary.from_list(frames)
    return described


def is_describing_exception(stack: str) -> bool:
    """True if a stack of faulthandler shows that the rank was inside ``describe_exception``."""
    frame = rf'{re.escape(Path(__file__).name)}", line \d+ in describe_exception$'
    return re.search(frame, stack, re.MULTILINE) is not None


# Finds out which rank caused a failure, and which ranks only waited for others.

WATCHDOG = "Watchdog caught collective operation timeout"
"""NCCL's watchdog prints this before it kills the waiting process with SIGABRT."""

COLLECTIVE_TIMED_OUT = "its collective timed out"
"""The report says this of a rank that NCCL's watchdog has killed."""

CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
TIMED_OUT = ("Timed out waiting", "timed out", WATCHDOG)
"""gloo and NCCL write phrases of these two lists on ranks that waited for another rank."""

BACKEND_MARKS = ("/gloo/", "NCCL", "ProcessGroup")
"""Every such message of a backend contains one of these marks.

Messages of the user's own code do not, though that code can time out and lose connections as well.
"""


def failure(ends: Iterable[RankEnd], deadline: str) -> RankFailed:
    """The error to raise, given how every rank ended.

    ``deadline`` says in words which time the ranks had, such as "within 5 s". It is used only if
    they timed out.
    """
    ends = sorted(ends, key=lambda end: end.rank)
    culprits = _culprits(ends)
    ordered = sorted(ends, key=lambda end: (_order(end, end.rank in culprits), end.at))
    first, waiting = ordered[0], who_waits(ends)
    if first.kind == "running" or (first.waits and _contains(first.what, TIMED_OUT)):
        late = [end.rank for end in ordered if end.failed]
        return RanksTimedOut(f"{_ranks(late)} did not come back {deadline}", ordered, waiting)
    place = f"rank {first.rank} (node {first.node}, local rank {first.local_rank})"
    return RankFailed(f"{place}: {first.what}", ordered, waiting)


def who_waits(ends: Sequence[RankEnd]) -> str:
    """A sentence that says who waits for whom, in which collective; "" if nobody waits."""
    waiting = [end for end in ends if end.waits]
    others = [end for end in ends if not end.waits]
    if not waiting:
        return ""
    calls = _by_call(waiting)
    numbers = {end.last.number for end in waiting if end.last is not None}
    if len(calls) > 1 and (not others or len(numbers) == 1):
        clauses = [f"{_ranks(ranks)} {_verb(ranks, 'call')} {call}" for call, ranks in calls]
        clauses += [_rank_and_state(end) for end in others if end.failed]
        return _sentence(f"the ranks do not call the same collective: {'; '.join(clauses)}")
    clauses = [f"{_ranks(ranks)} {_verb(ranks, 'wait')}{_in(call)}" for call, ranks in calls]
    if others:
        awaited = [end for end in others if end.failed] or others
        states = ", and for ".join(map(_rank_and_state, awaited))
        return _sentence(f"{'; '.join(clauses)}, for {states}")
    all_alike = ", the same on all ranks"
    if numbers != {0}:
        all_alike += ": the backend itself, or the network, hangs"
    return _sentence(clauses[0] + ("" if calls[0][0] is None else all_alike))


def was_left_waiting(message: str) -> bool:
    """True if this is the message of a collective that failed because another rank did not come."""
    return _contains(message, BACKEND_MARKS) and _contains(message, (*CONNECTION_LOST, *TIMED_OUT))


def innermost_line(stack: str) -> tuple[str, str]:
    """The innermost line of the user's code in a stack of faulthandler, or else outside torch, and
    the outermost function of torch inside it; "" if the innermost line of all is not in torch.
    """
    frames = STACK_FRAME.findall(stack.rpartition("(most recent call first)")[2])
    inside = list(takewhile(lambda frame: _is_torch(frame[0]), frames))
    called = [function for _, _, function in inside if function != "wrapper"]
    outside = [(file, int(number)) for file, number, _ in frames[len(inside) :]]
    users = (place for place in outside if is_users(place[0]))
    line = next(users, next(iter(outside), None))
    return "" if line is None else text_of_line(*line), (called or [""])[-1]


STACK_FRAME = re.compile(r'^ *File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
"""A frame in a stack of faulthandler."""


def _contains(text: str, phrases: Iterable[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def _is_torch(line: str) -> bool:
    return f"{os.sep}torch{os.sep}" in line


def _order(end: RankEnd, culprit: bool) -> int:
    """The place in the report: deaths, exceptions, ranks that never came, ranks that waited."""
    if end.waits:
        return 3 if culprit else 4
    return {"signal": 0, "exit": 0, "running": 2, "finished": 5}.get(end.kind, 1)


def _culprits(ends: Sequence[RankEnd]) -> set[int]:
    """The waiting ranks that are reported before other waiting ranks.

    If all ranks wait, they are the ranks in the collective that the fewest ranks call. Otherwise
    they are all ranks that wait, since the cause is among the ranks that do not.
    """
    waiting = [end for end in ends if end.waits]
    if len(waiting) < len(ends):
        return {end.rank for end in waiting}
    return set(_by_call(waiting)[-1][1])


def _by_call(waiting: Sequence[RankEnd]) -> list[tuple[str | None, list[int]]]:
    """The ranks by the collective that they are in, the one with the most ranks first."""
    ranks: dict[str | None, list[int]] = {}
    for end in waiting:
        ranks.setdefault(None if end.last is None else str(end.last), []).append(end.rank)
    return sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))


def _in(call: str | None) -> str:
    return " in a collective" if call is None else f" in {call}"


def _rank_and_state(end: RankEnd) -> str:
    after = "" if end.last is None else f" after {end.last.op} #{end.last.number}"
    state = {
        "finished": f"which has finished{after}",
        "running": f"which is{_at(end.line)}{after}",
        "exception": f"which raised {end.what.splitlines()[0][:120]}" if end.what else "",
    }.get(end.kind, f"which was {end.what}" if end.kind == "signal" else f"which {end.what}")
    if end.kind == "running" and end.what != "still running":
        state = f"which {end.what}"
    return f"rank {end.rank}, {state}"


def _at(line: str) -> str:
    """`` at file.py:12``."""
    found = PLACE.match(line)
    return f" at {Path(found['file']).name}:{found['number']}" if found else " somewhere else"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
