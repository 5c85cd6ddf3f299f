"""Who is to blame: the ends of all ranks in order, root cause first, and who waited for whom."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from ddp_equivalence.ranks.failure import RankEnd, RankFailed, RanksTimedOut

LEFT_BEHIND = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
TIMED_OUT = ("Timed out waiting", "timed out", "Watchdog caught collective operation timeout")
"""What gloo and NCCL say on the ranks that waited for another one."""

OF_A_BACKEND = ("/gloo/", "NCCL", "ProcessGroup")
"""Is in such a message too: a user's own code times out as well, and loses connections."""

WATCHDOG = "Watchdog caught collective operation timeout"
"""NCCL's, which ends the process that waited by SIGABRT; its words are in the output."""

NOT_IN_TIME = "its collective timed out"


def failure(ends: Iterable[RankEnd], deadline: str) -> RankFailed:
    """The error for what happened, with an entry for every rank; ``deadline``: "within ..."."""
    ends = sorted(ends, key=lambda end: end.rank)
    culprits = _culprits(ends)
    ordered = sorted(ends, key=lambda end: (_weight(end, end.rank in culprits), end.at))
    first, waiting = ordered[0], who_waits(ends)
    if first.kind == "running" or (first.waits and _says(first.what, TIMED_OUT)):
        late = [end.rank for end in ordered if end.failed]
        return RanksTimedOut(f"{_ranks(late)} did not come back {deadline}", ordered, waiting)
    where = f"rank {first.rank} (node {first.node}, local rank {first.local_rank})"
    return RankFailed(f"{where}: {first.what}", ordered, waiting)


def who_waits(ends: Sequence[RankEnd]) -> str:
    """One sentence: who waits for whom, in which collective; "" if nobody waits."""
    waiting = [end for end in ends if end.waits]
    others = [end for end in ends if not end.waits]
    if not waiting:
        return ""
    calls = _by_call(waiting)
    numbers = {end.last.number for end in waiting if end.last is not None}
    if len(calls) > 1 and (not others or len(numbers) == 1):
        told = [f"{_ranks(ranks)} {_verb(ranks, 'call')} {call}" for call, ranks in calls]
        told += [_state(end) for end in others if end.failed]
        return _sentence(f"the ranks do not call the same: {'; '.join(told)}")
    told = [f"{_ranks(ranks)} {_verb(ranks, 'wait')}{_in(call)}" for call, ranks in calls]
    if others:
        blamed = [end for end in others if end.failed] or others
        return _sentence(f"{'; '.join(told)}, for {', and for '.join(map(_state, blamed))}")
    same = ", the same for all: the backend itself, or the network, hangs"
    return _sentence(told[0] + ("" if calls[0][0] is None else same))


def was_left_waiting(raised: str) -> bool:
    """True if a collective failed because another rank did not come, or had gone."""
    return _says(raised, OF_A_BACKEND) and _says(raised, (*LEFT_BEHIND, *TIMED_OUT))


def _says(text: str, phrases: Iterable[str]) -> bool:
    return any(phrase in text for phrase in phrases)


def innermost(stack: str) -> tuple[str, bool]:
    """Of a faulthandler stack: the innermost line outside torch, and if torch was at work in it."""
    main_thread = stack.rpartition("(most recent call first)")[2]
    lines = [line.strip() for line in main_thread.splitlines() if line.strip().startswith("File")]
    own = [line for line in lines if not _of_torch(line)]
    return (own[0] if own else ""), bool(lines) and _of_torch(lines[0])


def is_telling(stack: str) -> bool:
    """True if the rank was putting into words what it raised."""
    return re.search(r'process\.py", line \d+ in raised$', stack, re.MULTILINE) is not None


def _of_torch(line: str) -> bool:
    return f"{os.sep}torch{os.sep}" in line


def _weight(end: RankEnd, culprit: bool) -> int:
    """Deaths, then exceptions, then who never came, then who waited for it."""
    if end.waits:
        return 3 if culprit else 4
    return {"signal": 0, "exit": 0, "running": 2, "finished": 5}.get(end.kind, 1)


def _culprits(ends: Sequence[RankEnd]) -> set[int]:
    """Of ranks that all wait: those that call what fewest call."""
    waiting = [end for end in ends if end.waits]
    if len(waiting) < len(ends):
        return {end.rank for end in waiting}
    return set(_by_call(waiting)[-1][1])


def _by_call(waiting: Sequence[RankEnd]) -> list[tuple[str | None, list[int]]]:
    """The ranks by the collective that they are in, most first."""
    found: dict[str | None, list[int]] = {}
    for end in waiting:
        found.setdefault(None if end.last is None else str(end.last), []).append(end.rank)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[1]))


def _in(call: str | None) -> str:
    return " in a collective" if call is None else f" in {call}"


def _state(end: RankEnd) -> str:
    done = "" if end.last is None else f" after {end.last.op} #{end.last.number}"
    what = {
        "finished": f"which has finished{done}",
        "running": f"which is{f' at {end.line}' if end.line else ' somewhere else'}{done}",
        "exception": f"which raised {end.what.splitlines()[0][:120]}" if end.what else "",
    }.get(end.kind, f"which was {end.what}" if end.kind == "signal" else f"which {end.what}")
    if end.kind == "running" and end.what != "still running":
        what = f"which {end.what}"
    return f"rank {end.rank}, {what}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
