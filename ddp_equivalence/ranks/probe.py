"""Do the collectives work? Asked before anybody blames a loss for a library's fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import pickling, probe_on_rank
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.probe_on_rank import Answer
from ddp_equivalence.ranks.rank_set import Ranks
from ddp_equivalence.ranks.warm_ranks import warm_ranks

__all__ = ["DEADLINE", "Answer", "ask", "ask_once", "probe", "refused_in_short"]

DEADLINE = 30.0
"""Seconds that the ranks get for all questions."""

_known: dict[tuple[str, str, int], tuple[Answer, ...]] = {}
"""What a backend on a kind of device has answered, by their number of ranks, in this process."""


def probe(
    layout: Layout, lane: Lane, collective_timeout: float = DEADLINE / 2
) -> tuple[Answer, ...]:
    """Ask the collectives of this lane, once in a run for each number of ranks.

    ``collective_timeout``: that of the warm ranks to ask, so that no new ones start. Not with ranks
    in hand: see ``ask``. Raises RankFailed or RanksTimedOut.
    """
    key = lane.backend, lane.device_type, layout.world_size
    if key not in _known:
        with warm_ranks().acquire(layout, lane, collective_timeout) as ranks:
            _known[key] = ask(ranks)
    return _known[key]


def ask_once(ranks: Ranks, layout: Layout, lane: Lane) -> tuple[Answer, ...]:
    """As ``probe``, of ranks in hand. Raises RankFailed or RanksTimedOut."""
    key = lane.backend, lane.device_type, layout.world_size
    if key not in _known:
        _known[key] = ask(ranks)
    return _known[key]


def ask(
    ranks: Ranks, deadline: float = DEADLINE, work: Callable[..., object] = probe_on_rank.run
) -> tuple[Answer, ...]:
    """Ask the collectives of these ranks: every question once, in order; wrong if on one rank.

    Raises RankFailed or RanksTimedOut.
    """
    ranks.submit(pickling.dumps(work, None))
    by_rank: dict[int, tuple[Answer, ...]] = dict(ranks.collect(deadline))
    return _joined(dict(sorted(by_rank.items())))


def refused_in_short(answers: tuple[Answer, ...]) -> str:
    """What was refused, without sizes and groups, and the reason given first; "" if nothing was."""
    refused = [one for one in answers if one.refused]
    if not refused:
        return ""
    kinds = dict.fromkeys(_kind(one.what) for one in refused)
    return f"{', '.join(kinds)} ({refused[0].refused})"


def _kind(what: str) -> str:
    """``all_reduce avg of 7 float16 on 2 ranks`` is ``all_reduce avg of float16``."""
    collective, _, rest = what.partition(" of ")
    return f"{collective} of {rest.split()[1]}"


def _joined(by_rank: Mapping[int, tuple[Answer, ...]]) -> tuple[Answer, ...]:
    found: dict[str, Answer] = {}
    for rank, answers in by_rank.items():
        for one in answers:
            before = found.setdefault(one.what, _of(rank, one))
            if bool(before.refused) != bool(one.refused):
                detail = "refused on some ranks only"
                found[one.what] = replace(before, right=False, refused="", detail=detail)
            elif one.wrong and not before.wrong:
                found[one.what] = _of(rank, one)
    return tuple(found.values())


def _of(rank: int, answer: Answer) -> Answer:
    return replace(answer, detail=f"rank {rank}: {answer.detail}") if answer.wrong else answer
