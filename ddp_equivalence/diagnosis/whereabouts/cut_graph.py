"""The lines at which a gradient ended on its way back, and backward methods of the user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_equivalence.diagnosis.lines.of_gradients import lines_that_ask
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces, Replay, agree, replay_of
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, first_of_each_line
from ddp_equivalence.measurement.calls import CodeLine, DeafBackward
from ddp_equivalence.measurement.graph_watch import GIVES_NUMBERS, Cut, OwnBackward
from ddp_equivalence.measurement.measure import OneRank
from ddp_equivalence.measurement.observation import Observation

MOST_CUT_LINES = 2

NEAR = 2
"""Lines that are no further apart are shown as one."""

SAME = 1e-5
"""Values of a rank and of the replay whose relative difference is smaller are equal."""


@dataclass(frozen=True)
class CutGraph:
    """``headline``: in a few words. ``sentence``: what was recorded. ``lines``: the cuts, and where
    their results were used. ``is_certain``: the gradient ended there without any doubt.
    """

    headline: str
    sentence: str
    lines: tuple[PointedLine, ...]
    is_certain: bool = True


def cut_graph(pieces: Pieces, piece: Piece, loss_factor: float | None) -> CutGraph | None:
    """Why the gradient of a piece is not that of its rows, although its values are right.

    ``loss_factor``: its loss is this many times that of its rows. None if nothing was recorded that
    stops or changes a gradient on its way back.
    """
    is_right = loss_factor is not None and abs(loss_factor - 1) <= max(SAME, pieces.tolerance)
    if piece.call is None or not is_right:
        return None
    replay = replay_of(pieces, piece)
    seen = pieces.view.observed.by_rank[piece.rank]
    return cut_graph_of(seen, piece.call.step, piece.call.backwards, replay)


def own_backward_lines(pieces: Pieces, piece: Piece) -> list[PointedLine]:
    """The backward methods that ran in the backward pass of a piece, and not for its rows alone."""
    replay = replay_of(pieces, piece)
    if piece.call is None or replay is None:
        return []
    seen = pieces.view.observed.by_rank[piece.rank]
    own = _own_backwards(seen, piece.call.step, piece.call.backwards, replay)
    return [_own_line(one) for one in own[:MOST_CUT_LINES]]


def cut_graph_of(
    seen: Observation, step: int, backwards: int, replay: Replay | None
) -> CutGraph | None:
    """The same for one backward pass of a rank: that before which so many had begun."""
    own = _own_backwards(seen, step, backwards, replay)
    cuts = [one for one in seen.cuts if _is_of(one, step, backwards)]
    cuts = [one for one in cuts if replay is None or not _is_meant(one, replay.cuts)]
    cuts = [one for one in cuts if not one.is_leaf]
    reached = [one for one in cuts if one.reached and one.used_at is not None]
    withheld = [one for one in own if one.withheld]
    if reached:
        return _of_cuts(reached, withheld)
    if withheld:
        return _of_withheld(seen, withheld)
    if own:
        return _of_own(own)
    used = [one for one in cuts if one.used_at is not None or _has_left_torch(one)]
    return _of_cuts(used, own) if used else None


def _own_backwards(
    seen: Observation, step: int, backwards: int, replay: Replay | None
) -> list[OwnBackward]:
    """Those of one backward pass that the loss of the case does not run."""
    return [
        one
        for one in seen.own_backwards
        if (one.step, one.backwards) == (step, backwards + 1)
        and (replay is None or f"{one.name}Backward" not in replay.nodes)
    ]


def _is_of(cut: Cut, step: int, backwards: int) -> bool:
    """True for what was cut before this backward pass began, or while it ran."""
    return cut.step == step and cut.backwards == backwards + cut.in_backward


def _is_meant(cut: Cut, meant: Sequence[Cut]) -> bool:
    """True if the loss of the case cuts the same line, or the same values."""
    if any(cut.line == other.line for other in meant):
        return True
    values = [value for other in meant for value in other.values]
    return bool(cut.values) and all(
        any(agree(value, other, SAME) for other in values) for value in cut.values
    )


def _has_left_torch(cut: Cut) -> bool:
    """True if the numbers of a tensor went to Python, and not only a single one, as for a log."""
    return cut.what in GIVES_NUMBERS and any(math.prod(value.shape) > 1 for value in cut.values)


def cut_text(cut: Cut) -> str:
    """What the line did, as a clause."""
    if cut.what in GIVES_NUMBERS:
        return f"{cut.what}() gives numbers without a gradient"
    if cut.without_grad:
        return "the result is computed where gradients are turned off"
    if cut.what == "data":
        return ".data gives a tensor without a gradient"
    return f"{cut.what}() gives a tensor without a gradient"


def _of_cuts(cuts: Sequence[Cut], own: Sequence[OwnBackward]) -> CutGraph:
    lines: list[PointedLine] = []
    for cut in _distinct(cuts)[:MOST_CUT_LINES]:
        lines += off_lines(cut.off_at, cut.line)
        lines.append(PointedLine(cut.line, cut_text(cut), is_fault=cut.reached))
        if cut.used_at is not None and cut.used_at != cut.line:
            where = "a backward inside this one" if cut.in_backward else "the loss"
            goes = f"goes on with it, towards {where} ({cut.used_by})"
            lines.append(
                PointedLine(cut.used_at, goes if cut.reached else f"uses it ({cut.used_by})")
            )
    lines += [_own_line(one) for one in own[:1]]
    first = cuts[0]
    text = f"In line {first.line.number}, {cut_text(first)}"
    ends = "so no gradient flows back through it" if first.reached else "which goes on from there"
    return CutGraph("a gradient is cut off", f"{text}, {ends}.", tuple(lines), first.reached)


def off_lines(off: CodeLine | None, line: CodeLine) -> list[PointedLine]:
    """The line that turned gradients off, unless it is next to the line that it was done for."""
    if off is None or (off.file == line.file and abs(off.number - line.number) <= NEAR):
        return []
    return [PointedLine(off, "turns gradients off for what it runs", is_fault=True)]


def leaf_line(seen: Observation, step: int, backwards: int) -> PointedLine | None:
    """The last line of a backward pass that made a new leaf of something that has a gradient."""
    leaves = [one for one in seen.cuts if one.is_leaf and _is_of(one, step, backwards)]
    note = "a new leaf: its gradient goes on only where the step passes it on"
    return PointedLine(leaves[-1].line, note, is_fault=True) if leaves else None


def _of_withheld(seen: Observation, own: Sequence[OwnBackward]) -> CutGraph:
    one = own[0]
    asked = lines_that_ask(seen, one)
    returned = [_own_line(other) for other in own[:MOST_CUT_LINES]]
    if asked:
        returned = [replace(other, is_fault=False) for other in returned]
    return CutGraph(
        "a backward method returns no gradient",
        f"{one.name}.backward returned None for input {one.withheld[0]}, which needs a gradient.",
        (*asked, *returned),
    )


def _of_own(own: Sequence[OwnBackward]) -> CutGraph:
    names = ", ".join(dict.fromkeys(one.name for one in own))
    return CutGraph(
        "backward runs a method of your own",
        f"Backward ran {names}.backward, which the loss of the case does not.",
        tuple(_own_line(one) for one in own[:MOST_CUT_LINES]),
        is_certain=False,
    )


def _own_line(one: OwnBackward) -> PointedLine:
    if one.withheld:
        numbers = " and ".join(map(str, one.withheld))
        note = f"returns no gradient for input {numbers} of {one.name}, which needs one"
    else:
        note = (
            f"the gradient that {one.name} gives back; the loss of the case runs no such function"
        )
    return PointedLine(one.line, note, is_fault=True)


def _distinct(cuts: Sequence[Cut]) -> list[Cut]:
    """Each line once."""
    return list({cut.line: cut for cut in reversed(cuts)}.values())[::-1]


# Backward methods of the user's own that return the same whatever gradient they are given.

MOST_INPUTS = 3


def deaf_methods(runs: OneRank, *, is_right_alone: bool) -> tuple[DeafBackward, ...]:
    """Those of the run on one rank; where this is right, only those that more ranks add."""
    if not is_right_alone:
        return runs.alone.deaf
    found = dict.fromkeys(one for run in runs.by_rank.values() for one in run.deaf)
    return tuple(one for one in found if one not in runs.alone.deaf)


def with_deaf_methods(
    found: Whereabouts, deaf: tuple[DeafBackward, ...], view: View
) -> Whereabouts:
    """What was found already, with the lines at which these methods returned."""
    by_name = {one.name: one for one in deaf}
    lines: dict[str, PointedLine] = {}
    for seen in view.observed.by_rank.values():
        for own in seen.own_backwards:
            if own.name in by_name and own.step == view.setting.step:
                note = (
                    f"the gradient of {_inputs(by_name[own.name])} is not made from the one given"
                )
                lines.setdefault(own.name, PointedLine(own.line, note, is_fault=True))
    if not lines:
        return found
    name = next(iter(lines))
    return replace(
        found,
        kind="own gradient",
        headline="a backward method ignores the gradient it is given",
        sentence=f"{name}.backward did not compute the gradient of {_inputs(by_name[name])} from "
        f"the one that it was given, which is not 1. {found.sentence}",
        lines=first_of_each_line(
            [*lines.values(), *(replace(one, is_fault=False) for one in found.lines)]
        ),
        fix="",
    )


def _inputs(one: DeafBackward) -> str:
    numbers = [str(number) for number in one.inputs[:MOST_INPUTS]]
    if len(one.inputs) > MOST_INPUTS:
        return f"inputs {', '.join(numbers)}, ..."
    if len(numbers) == 1:
        return f"input {numbers[0]}"
    return f"inputs {', '.join(numbers[:-1])} and {numbers[-1]}"
