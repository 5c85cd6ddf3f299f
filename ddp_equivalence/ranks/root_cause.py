"""Finds out which rank caused a failure, and which ranks only waited for others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ddp_equivalence.ranks.failure import RankEnd, RankFailed, RanksTimedOut

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
    all_alike = ", the same on all ranks: the backend itself, or the network, hangs"
    return _sentence(clauses[0] + ("" if calls[0][0] is None else all_alike))


def was_left_waiting(message: str) -> bool:
    """True if this is the message of a collective that failed because another rank did not come."""
    return _contains(message, BACKEND_MARKS) and _contains(message, (*CONNECTION_LOST, *TIMED_OUT))


def innermost_line(stack: str) -> tuple[str, bool]:
    """The innermost line outside torch in a stack of faulthandler.

    The second value is True if the innermost line of all is in torch.
    """
    main_thread = stack.rpartition("(most recent call first)")[2]
    lines = [line.strip() for line in main_thread.splitlines() if line.strip().startswith("File")]
    outside_torch = [line for line in lines if not _is_torch(line)]
    return (outside_torch[0] if outside_torch else ""), bool(lines) and _is_torch(lines[0])


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
        "running": f"which is{f' at {end.line}' if end.line else ' somewhere else'}{after}",
        "exception": f"which raised {end.what.splitlines()[0][:120]}" if end.what else "",
    }.get(end.kind, f"which was {end.what}" if end.kind == "signal" else f"which {end.what}")
    if end.kind == "running" and end.what != "still running":
        state = f"which {end.what}"
    return f"rank {end.rank}, {state}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
