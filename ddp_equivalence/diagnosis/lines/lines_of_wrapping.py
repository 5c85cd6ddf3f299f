"""The calls that gave some parameters to a wrapper whose group has not all ranks."""

from __future__ import annotations

from collections.abc import Collection

from ddp_equivalence.diagnosis.lines.given_to import (
    argument_of_line,
    lines_that_made,
    sole_origin,
)
from ddp_equivalence.diagnosis.lines.run_lines import run_lines
from ddp_equivalence.diagnosis.lines.words_of_lines import counted, names_text
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.reduction_groups import groups_text
from ddp_equivalence.diagnosis.step_calls import Place, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

OF_THE_GROUP = ("mesh", "device_mesh", "process_group")
"""The arguments that say among which ranks a wrapper reduces."""


def in_small_groups(view: View) -> list[Place]:
    """The lines that gave parameters to a wrapper or to FSDP, with a group of only some ranks."""

    def is_small(call: Call) -> bool:
        return bool(call.names) and 0 < len(call.ranks) < view.world_size

    return _of_all_steps(view).places(Kind.SHARDING, Kind.WRAP, where=is_small)


def sharded_names(view: View) -> set[str]:
    """The parameters that were given to FSDP, which reduces their gradients; not those that it was
    told to ignore.
    """
    places = _of_all_steps(view).places(Kind.SHARDING, where=lambda call: bool(call.names))
    return {
        name
        for place in places
        for calls in place.by_rank.values()
        for call in calls
        for name in call.names
    }


def lines_of_sharding(view: View) -> list[PointedLine]:
    """The lines that gave parameters to FSDP, the last one first."""
    places = _of_all_steps(view).places(Kind.SHARDING)
    return [
        place.pointed(f"{place.first.what} is given {counted(len(place.names), 'parameter')}")
        for place in reversed(places)
    ]


def _of_all_steps(view: View) -> StepCalls:
    return StepCalls({rank: seen.calls for rank, seen in view.observed.by_rank.items()})


def groups_of(place: Place) -> tuple[tuple[int, ...], ...]:
    """The groups of the calls at this place, on all ranks, each once."""
    return tuple(sorted({one.ranks for calls in place.by_rank.values() for one in calls}))


def names_in_small_groups(view: View) -> set[str]:
    """The parameters that these lines gave away."""
    return {
        name
        for place in in_small_groups(view)
        for calls in place.by_rank.values()
        for call in calls
        for name in call.names
    }


def lines_of_small_groups(view: View, names: Collection[str] | None = None) -> list[PointedLine]:
    """The lines that gave a wrapper parameters with a group of some ranks, and what made the group.

    ``names``: only of these parameters.
    """
    found: list[PointedLine] = []
    for place in in_small_groups(view):
        given = [name for name in place.names if names is None or name in names]
        if not given:
            continue
        run = run_lines(view, place.ranks[0])
        for bound in argument_of_line(place.line, OF_THE_GROUP)[:1]:
            origin = sole_origin(run, bound)
            lines = lines_that_made(run, bound) if origin is None else [origin[0].line(origin[1])]
            made = "" if origin is None else f"makes the group of line {place.line.number}"
            found += [PointedLine(line, made) for line in lines[:1] if line != place.line]
        note = f"{place.first.what} in {groups_text(groups_of(place))}: {names_text(given)}"
        found.append(place.pointed(note, is_fault=True))
    return found
