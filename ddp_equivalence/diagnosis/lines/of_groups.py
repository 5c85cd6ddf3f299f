"""The lines that made groups of ranks, or gave some to a wrapper or a communication hook."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddp_equivalence.diagnosis.lines.origins import (
    Origins,
    divided_by_in,
    given_at,
    set_at,
)
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Kind

# The calls that gave parameters to a wrapper whose group has not all ranks, or to FSDP.

OF_THE_GROUP = ("mesh", "device_mesh", "process_group")
"""The arguments that say among which ranks a wrapper reduces."""


def in_small_groups(view: View) -> list[CallSite]:
    """The lines that gave parameters to a wrapper or to FSDP, with a group of only some ranks."""

    def is_small(call: Call) -> bool:
        return bool(call.names) and 0 < len(call.ranks) < view.world_size

    return view.observed.calls_of_all_steps.places(Kind.SHARDING, Kind.WRAP, where=is_small)


def names_in_small_groups(view: View) -> set[str]:
    """The parameters that these lines gave away."""
    return _names(in_small_groups(view))


def sharded_names(view: View) -> set[str]:
    """The parameters that were given to FSDP, which reduces their gradients; not those that it was
    told to ignore.
    """
    return _names(view.observed.calls_of_all_steps.places(Kind.SHARDING))


def _names(places: Sequence[CallSite]) -> set[str]:
    calls = (call for place in places for of_rank in place.by_rank.values() for call in of_rank)
    return {name for call in calls for name in call.names}


def lines_of_sharding(view: View) -> list[PointedLine]:
    """The lines that gave parameters to FSDP, the last one first."""
    return [
        place.pointed(f"{place.first.what} is given {counted(len(place.names), 'parameter')}")
        for place in reversed(view.observed.calls_of_all_steps.places(Kind.SHARDING))
    ]


def groups_of(place: CallSite) -> tuple[tuple[int, ...], ...]:
    """The groups of the calls at this place, on all ranks, each once."""
    return tuple(sorted({one.ranks for calls in place.by_rank.values() for one in calls}))


def lines_of_small_groups(view: View, names: Collection[str] | None = None) -> list[PointedLine]:
    """The lines that gave a wrapper parameters with a group of some ranks, and what made the group.

    ``names``: only of these parameters.
    """
    found: list[PointedLine] = []
    for place in in_small_groups(view):
        given = [name for name in place.names if names is None or name in names]
        if not given:
            continue
        group = given_at(place.line, OF_THE_GROUP)
        made = set_at(run_lines(view, place.ranks[0]), group) if group is not None else place.line
        if made != place.line:
            found.append(PointedLine(made, f"makes the group of line {place.line.number}"))
        note = f"{place.first.what} in {groups_text(groups_of(place))}: {names_text(given)}"
        found.append(place.pointed(note, is_fault=True))
    return found


# The lines that made the numbers by which a communication hook divides.


def lines_of_hook_divisors(view: View, hook: CallSite) -> list[PointedLine]:
    """The lines that set what a communication hook multiplies or divides by."""
    begins, run = hook.first.made_at, run_lines(view, hook.ranks[0])
    found: dict[CodeLine, PointedLine] = {}
    for name in divided_by_in(begins) if begins is not None else ():
        given = Origins(run).of_attribute(name)
        if len(given) == 1 and (line := set_at(run, given[0])) != hook.line:
            found.setdefault(line, PointedLine(line, f"sets {name}, by which the hook divides"))
    return list(found.values())
