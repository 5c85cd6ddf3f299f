"""Only some parameters differ: those that a wrapper reduces in a group of only some ranks."""

from __future__ import annotations

from ddp_equivalence.diagnosis.lines.lines_of_wrapping import (
    groups_of,
    in_small_groups,
    lines_of_small_groups,
    names_in_small_groups,
)
from ddp_equivalence.diagnosis.reduction_groups import groups_text
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, distinct, named


def fault_of_small_groups(view: View) -> Whereabouts | None:
    """Which call gave the parameters that differ, and only these, a group without all ranks."""
    wrong = view.measured.differing
    in_small = names_in_small_groups(view)
    if not wrong or wrong != in_small or len(wrong) == len(view.parameters.names):
        return None  # what is right in such a group was reduced between the groups as well
    names = tuple(name for name in view.parameters.names if name in wrong)
    places = [place for place in in_small_groups(view) if wrong & set(place.names)]
    where = groups_text(tuple(sorted({one for place in places for one in groups_of(place)})))
    what = " and ".join(dict.fromkeys(place.first.what for place in places))
    return Whereabouts(
        "reduction",
        "some parameters are reduced in smaller groups",
        f"{what} was given {named(names)} with {where}, not with all {view.world_size} ranks. All "
        "other parameters are right.",
        distinct(lines_of_small_groups(view, names)),
        names,
        tuple(range(view.world_size)),
        fix=f"give {named(names)} the mesh or group of all {view.world_size} ranks.",
    )
