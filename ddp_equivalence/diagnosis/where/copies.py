"""Which tensors the step declares to be equal on several ranks, although they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.lines.behind import lines_behind
from ddp_equivalence.diagnosis.lines.of_data import lines_of_reading, lines_that_deal_to_all
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_set_groups
from ddp_equivalence.diagnosis.lines.source import run_lines
from ddp_equivalence.diagnosis.reduced import groups_text, unequal_copies
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.pieces import rows_by_rank
from ddp_equivalence.diagnosis.where.whereabouts import Whereabouts, distinct, ranked

MOST_SHOWN = 3


def fault_of_unequal_copies(view: View) -> Whereabouts | None:
    """Where ranks that share the work of a layer go on with different values as if they were equal;
    None if none were seen to do so.
    """
    found = unequal_copies(view)
    if found is None or found.call.at is None:
        return None
    ranks = tuple(found.norms)
    who, shown = ranked(ranks, view.world_size), list(found.norms.items())[:MOST_SHOWN]
    norms = ", ".join(f"rank {rank} {text_of(norm, '.3g')}" for rank, norm in shown)
    line = found.call.at
    rows = rows_by_rank(view)
    if found.is_taken_apart:
        return Whereabouts(
            "reduction",
            f"line {line.number} takes what one rank has for the whole",
            f"Line {line.number} {found.note}, and it differs between ranks.",
            (PointedLine(line, f"its norm: {norms}", True),),
            view.parameters.names,
            tuple(range(view.world_size)),
            fix=f"{found.fix}.",
        )
    place = PointedLine(line, f"takes its input for equal; its norm: {norms}")
    if len({frozenset(row for part in rows[rank] for row in part) for rank in ranks}) > 1:
        return Whereabouts(
            "own gradient",
            "ranks that share a layer read different examples",
            f"{who.capitalize()} each compute a part of the layers at line {line.number}, so they "
            "must read the same examples, and they do not.",
            distinct([*_lines_of_examples(view, ranks), place]),
            view.parameters.names,
            tuple(range(view.world_size)),
            fix=f"give {who} the same examples: deal them by the rank in the data-parallel group.",
            explains_all=True,
        )
    return Whereabouts(
        "own gradient",
        "ranks that share a layer have different inputs",
        f"{who.capitalize()} each compute a part of the layers at line {line.number}, so they must "
        "have the same input, and they do not.",
        (PointedLine(place.line, place.note, True),),
        view.parameters.names,
        tuple(range(view.world_size)),
    )


def _lines_of_examples(view: View, ranks: Sequence[int]) -> list[PointedLine]:
    """The lines that give these ranks their examples, and what those lines read."""
    gathering = _lines_of_gathering(view, ranks)
    if gathering:
        return gathering
    reading = lines_of_reading(view, lines_that_deal_to_all(view), ranks)
    run = run_lines(view, ranks[0])
    return [*reading, *lines_behind(run, reading[0].line, 2)] if len(reading) == 1 else reading


def _lines_of_gathering(view: View, ranks: Sequence[int]) -> list[PointedLine]:
    """The line that chose the group in which a rank of these gathers examples without the others,
    and the call that gathers them.
    """
    gathers = view.observed.calls.collectives(
        lambda call, of: of.op.startswith("all_gather") and not call.in_backward
    )
    for place in gathers:
        together = any({*ranks} <= {*group} for group in place.groups)
        chosen = [] if together else lines_that_set_groups(view, [place])
        if chosen:
            return [
                replace(chosen[0], is_fault=True),
                place.pointed(f"gathers examples in {groups_text(place.groups)}"),
            ]
    return []
