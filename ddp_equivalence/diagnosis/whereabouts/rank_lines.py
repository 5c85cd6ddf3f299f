"""The lines of the user's code that only some ranks ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.whereabouts.whereabouts import ranked
from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.observation import Observation

SAME = 1e-3
"""Values that differ by less than this, relative to the largest one, are equal."""


def lines_only_on(observed: Mapping[int, Observation], ranks: Sequence[int]) -> list[PointedLine]:
    """The first line that exactly these ranks ran, or exactly the others; [] if there is none.

    All steps count, and lines of the forward and the backward pass too.
    """
    world_size = len(observed)
    if len(ranks) in (0, world_size):
        return []
    others = tuple(rank for rank in observed if rank not in ranks)
    run: dict[CodeLine, list[int]] = {}
    order: dict[CodeLine, int] = {}
    for rank, seen in sorted(observed.items()):
        for number, line in enumerate(seen.trace.lines_run or {}):
            run.setdefault(line, []).append(rank)
            order.setdefault(line, number)
    found = [line for line, by in run.items() if tuple(by) in (tuple(ranks), others)]
    if not found:
        return []
    # Up to the first line that not all ranks run, all of them have run the same lines.
    first = min(found, key=lambda line: order[line])
    who = ranked(run[first], world_size)
    note = f"only {who} {'runs' if len(run[first]) == 1 else 'run'} this line"
    return [PointedLine(first, note, True)]


def odd_ranks(values: Mapping[int, float]) -> tuple[int, ...]:
    """The ranks whose values are not those of most; () if most ranks have no common value."""
    most = max(map(abs, values.values()), default=0.0)
    near = {
        rank: [other for other, value in values.items() if abs(value - one) <= SAME * most]
        for rank, one in values.items()
    }
    common = max(near.values(), key=len, default=[])
    if len(common) * 2 <= len(values):
        return ()
    return tuple(rank for rank in values if rank not in common)
