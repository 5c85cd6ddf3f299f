"""Checks that collectives give the right results, before a difference is blamed on the user's loss.

To probe is to run many collectives on ranks and compare the results. ``probe`` takes warm ranks
itself; ``probe_ranks`` and ``probe_ranks_once`` use ranks that the caller holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import pickling, probe_on_rank
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.probe_on_rank import ProbeResult
from ddp_equivalence.ranks.rank_set import Ranks
from ddp_equivalence.ranks.warm_ranks import warm_ranks

__all__ = [
    "DEADLINE",
    "ProbeResult",
    "probe",
    "probe_ranks",
    "probe_ranks_once",
    "summarise_refusals",
]

DEADLINE = 30.0
"""Seconds that the ranks get for all collectives together."""

_known: dict[tuple[str, str, int], tuple[ProbeResult, ...]] = {}
"""(Backend, device type, world size) -> the results found earlier in this process."""


def probe(
    layout: Layout, lane: Lane, collective_timeout: float = DEADLINE / 2
) -> tuple[ProbeResult, ...]:
    """Probe a lane on warm ranks, once in this process for each number of ranks.

    ``collective_timeout``: pass that of a check, so that the check's ranks can be used. The caller
    must not hold ranks itself. Raises RankFailed or RanksTimedOut.
    """
    key = lane.backend, lane.device_type, layout.world_size
    if key not in _known:
        with warm_ranks().acquire(layout, lane, collective_timeout) as ranks:
            _known[key] = probe_ranks(ranks)
    return _known[key]


def probe_ranks_once(ranks: Ranks, layout: Layout, lane: Lane) -> tuple[ProbeResult, ...]:
    """Like ``probe``, on ranks that the caller holds. Raises RankFailed or RanksTimedOut."""
    key = lane.backend, lane.device_type, layout.world_size
    if key not in _known:
        _known[key] = probe_ranks(ranks)
    return _known[key]


def probe_ranks(
    ranks: Ranks, deadline: float = DEADLINE, work: Callable[..., object] = probe_on_rank.run
) -> tuple[ProbeResult, ...]:
    """Probe these ranks: one result per collective, wrong if it was wrong on any rank.

    Raises RankFailed or RanksTimedOut.
    """
    ranks.submit(pickling.dumps(work, None))
    by_rank: dict[int, tuple[ProbeResult, ...]] = dict(ranks.collect(deadline))
    return _joined(dict(sorted(by_rank.items())))


def summarise_refusals(results: tuple[ProbeResult, ...]) -> str:
    """The refused kinds of collectives, with the first reason that was given; "" if there are none.

    For example ``all_reduce avg of float16 (the first message of the backend)``.
    """
    refused = [result for result in results if result.refused]
    if not refused:
        return ""
    kinds = dict.fromkeys(_kind(result.collective) for result in refused)
    return f"{', '.join(kinds)} ({refused[0].refused})"


def _kind(collective: str) -> str:
    """``all_reduce avg of 7 float16 on 2 ranks`` becomes ``all_reduce avg of float16``."""
    name, _, rest = collective.partition(" of ")
    return f"{name} of {rest.split()[1]}"


def _joined(by_rank: Mapping[int, tuple[ProbeResult, ...]]) -> tuple[ProbeResult, ...]:
    joined: dict[str, ProbeResult] = {}
    for rank, results in by_rank.items():
        for result in results:
            before = joined.setdefault(result.collective, _with_rank(rank, result))
            if bool(before.refused) != bool(result.refused):
                detail = "refused on some ranks only"
                joined[result.collective] = replace(
                    before, correct=False, refused="", detail=detail
                )
            elif result.wrong and not before.wrong:
                joined[result.collective] = _with_rank(rank, result)
    return tuple(joined.values())


def _with_rank(rank: int, result: ProbeResult) -> ProbeResult:
    return replace(result, detail=f"rank {rank}: {result.detail}") if result.wrong else result
