"""Adds to the place of a difference the lines that a comparison with one rank shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.diagnose import Finding
from ddp_equivalence.diagnosis.examples_read import example_numbers
from ddp_equivalence.diagnosis.lines.behind import lines_behind
from ddp_equivalence.diagnosis.lines.of_loss import line_of_loss
from ddp_equivalence.diagnosis.lines.of_reduction import lines_of_no_sync, sharded_names
from ddp_equivalence.diagnosis.lines.origins import divisors
from ddp_equivalence.diagnosis.lines.source import (
    RunLines,
    called_name,
    place_at,
    run_lines,
)
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.own_errors import unless_it_fails
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE, unexplained
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.where.cuts import Cut, called, cut_text, lines_of_cuts
from ddp_equivalence.diagnosis.where.divergence import BesideOneRank, Divergence, makes_a_mean
from ddp_equivalence.diagnosis.where.gradient_path import backward_begins
from ddp_equivalence.diagnosis.where.loss import Scaling
from ddp_equivalence.diagnosis.where.own_gradient import lines_of_backwards, own_backwards
from ddp_equivalence.diagnosis.where.pieces import same_loss
from ddp_equivalence.diagnosis.where.step_and_loss import NUMBERS, Unlike
from ddp_equivalence.diagnosis.where.unread import Unread
from ddp_equivalence.diagnosis.where.whereabouts import (
    LOOK_FIRST,
    MOST_LINES,
    Whereabouts,
    first_of_each_line,
    positions_text,
)
from ddp_equivalence.measurement.calls import CodeLine, Kind, Operation

MOST_DIVERGENCES = 2
MOST_SHOWN = 4
MOST_WORDS = 9
"""So many words of what no rank reads stand in a headline."""

NOT_REDUCED = (
    "Line {} computes with the own gradients of each rank, which nothing has reduced by then."
)

OF_OWN_ROWS = (
    "Line {} computes with each rank's own sums or means, where one rank has those of all examples."
)

OF_WHOLE = (
    "Line {} adds what every rank has whole to the rank's own part of a sum, so that it counts "
    "once for each rank."
)

ONLY_RANKS_RUN = "Line {} runs otherwise on one rank, and what it makes goes into wrong gradients."

ROUNDING = 1e-6

MOVES_ROWS = "puts rows into another order"

ORDERING = frozenset({"sort", "topk", "msort"})
"""Operations that return values by their size."""

OTHER_GRADIENTS = "backward gives other gradients than on one rank"
OTHER_IN_BACKWARD = "backward gives other gradients than the loss of the case"

OWN_LEFT = "leaves the own gradients of each rank"
MULTIPLE = "a multiple of the value on one rank here"


def lines_to_edit(best: Finding | None, found: Whereabouts | None) -> Sequence[PointedLine] | None:
    """The lines that the report points at; None if the step changes gradients that were right, on
    one rank as on several. That may be wanted, such as clipping, and any edit would only undo it.
    """
    if found is not None and found.what == "right ones changed" and found.is_right_alone is False:
        return None
    lines: Sequence[PointedLine] = getattr(best or found, "lines", ())
    return lines


def with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    """The place that was found already, with the lines that one rank shows."""
    found = unless_it_fails(lambda: _with_one_rank(found, beside, view), lambda why: found)
    lines = tuple(beside.names.told(found.lines)) or found.lines
    is_marked = any(one.is_fault for one in lines)
    if is_marked:
        lines = tuple(one for one in lines if not one.of_rows)
    marks = found.marks if is_marked else ""
    return replace(found, rounds_in=beside.rounds_in, lines=lines, marks=marks)


def _with_one_rank(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    if ignores_the_loss(beside, view):
        return _with_ignored_loss(found, beside, view)
    found = _with_divergences(found, beside, view)
    if view.world_size == 1:
        found = replace(found, is_right_alone=None, marks="")
    if found.explains_all:
        return found
    cuts = beside.cuts
    if not cuts and (not beside.loss.unlike or has_right_loss(beside, view)):
        cuts = beside.loss.cuts
    wrapping = {one.line for one in view.observed.calls.places(Kind.WRAP)}
    cuts = tuple(one for one in cuts if one.ended.line not in wrapping)  # DDP copies weights there
    is_open = found.shows_later or found.kind == "not seen"
    if beside.unread and is_open:
        return with_unread(found, beside.unread)
    if cuts and cuts[0].ended.talks and (is_open or found.kind == "own gradient"):
        return with_cuts(found, cuts)  # what is seen besides may be right: it needs several ranks
    if cuts and is_open:
        found = with_cuts(found, cuts)
    factor = beside.factor_alone
    numbers = factor is not None and any(one.explains(factor) for one in beside.scalings)
    unlike = beside.loss.unlike or beside.loss.changed
    if found.kind == "reduction":  # the losses are right, and what becomes of gradients may not be
        is_vague = found.shows_later or found.what == "no weighted sum"
        marked = {one.line for one in found.lines if one.is_fault}
        changed = beside.loss.changed if is_vague else ()
        unlike = tuple(one for one in changed if one.line not in marked)
    if not unlike and found.kind == "not seen" and beside.loss.begins_right:
        return _with_own_backwards(found, view)
    return with_unlike_loss(found, unlike, view, beside, knows_numbers=numbers)


def _with_own_backwards(found: Whereabouts, view: View) -> Whereabouts:
    """The backward methods of the user's own, where the losses are right and gradients are not."""
    begins = [backward_begins(one.line) for one in view.observed.calls.backwards[:1]]
    return replace(
        found,
        kind="own gradient",
        headline="the losses are right, and the gradients are not",
        sentence="",
        lines=first_of_each_line([*_lines_of_own_backwards(view), *begins]),
    )


def _lines_of_own_backwards(view: View) -> list[PointedLine]:
    backward = next((one.first for one in view.observed.calls.backwards), None)
    return lines_of_backwards(own_backwards(view.observed.by_rank[0], backward))


def ignores_the_loss(beside: BesideOneRank, view: View) -> bool:
    """True if backward methods of the user's own drop the gradient that they are given."""
    own = any(one.own_backwards for one in view.observed.by_rank.values())
    return own and bool(beside.ignoring)


def _with_ignored_loss(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    own = _lines_of_own_backwards(view)
    names = names_text(beside.ignoring)
    others = [replace(one, is_fault=False) for one in found.lines if not one.begins_backward]
    return replace(
        found,
        kind="own gradient",
        headline="gradients do not depend on how the loss is scaled",
        sentence=f"A backward method drops the gradient that it is given, which is not 1, so the "
        f"gradients of {names} are made without it. {found.sentence}",
        lines=first_of_each_line([*own, *others]),
        fix="multiply what the backward method returns by the gradient that it is given.",
        is_right_alone=beside.is_right_alone,
        marks="",
        what="something else",
    )


def with_unread(found: Whereabouts, unread: Sequence[Unread]) -> Whereabouts:
    """The place that was found already, after the lines that take some examples and not others."""
    of: dict[tuple[int, ...], list[str]] = {}
    for one in unread:
        of.setdefault(one.examples, []).append(one.name)
    what = " and ".join(f"{example_numbers(n)} of {' and '.join(x)}" for n, x in of.items())
    some = f"some examples of {' and '.join(one.name for one in unread)}"
    lines = [PointedLine(line, "takes the others", True) for one in unread for line in one.lines]
    others = [replace(one, is_fault=False) for one in found.lines]
    before = "" if found.kind == "not seen" else found.sentence
    is_short = len(what.split()) <= MOST_WORDS
    told = "" if is_short else f"The loss of the case reads {what}, and no rank does."
    return replace(
        found,
        kind="own gradient",
        headline=f"no rank reads {what if is_short else some}",
        sentence=f"{told} {before}".strip(),
        lines=first_of_each_line([*lines, *others]),
        shows_later=False,
        what="something else",
    )


def with_cuts(found: Whereabouts, cuts: Sequence[Cut]) -> Whereabouts:
    """The place that was found already, after the lines at which gradients end."""
    cut = min(cuts, key=lambda one: one.is_leaf)
    number = cut.ended.line.number if cut.ended.line is not None else 0
    others = [replace(one, is_fault=False) for one in found.lines]
    missing = f"; {found.headline}" if found.what == "gradients missing" else ""
    return replace(
        found,
        kind="own gradient",
        headline=f"a gradient is cut off{missing}",
        sentence=f"Line {number} {cut_text(cut)}, so no gradient flows back through it. "
        f"{found.sentence}",
        lines=first_of_each_line([*lines_of_cuts(cuts), *others]),
        shows_later=False,
    )


def _with_divergences(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    if found.explains_all:
        return replace(found, is_right_alone=beside.is_right_alone)
    if found.kind == "reduction" and not beside.is_right_alone and must_be_the_loss(beside, view):
        return wrong_loss(found, beside, view)
    if _is_only_backward(beside):
        return _with_backward(found, beside, view)
    pointed = lines_of_divergences(beside, view)
    if found.kind == "not seen" and beside.left_unreduced:
        return _with_unreduced(found, beside, view)
    if not pointed:
        return replace(found, is_right_alone=beside.is_right_alone)
    found = _with_lines(found, beside, pointed, view)
    first, number = beside.divergences[0], pointed[0].line.number
    if found.kind != "not seen":
        told = _read_parts(first)
        if found.lines[0].line != pointed[0].line or first.unreduced:
            told = ""
        known = "" if told == OF_WHOLE else found.sentence  # it says more
        return replace(found, sentence=known or told.format(number))
    told, headline = _read_parts(first), "several ranks compute other values than one rank"
    if first.alone is None:
        told = ONLY_RANKS_RUN
    elif first.unreduced:
        told, headline = NOT_REDUCED, "gradients are used before they are reduced"
        lines = (*found.lines[:1], *lines_of_no_sync(view), *found.lines[1:])
        found = replace(found, lines=first_of_each_line(lines))
    return replace(
        found,
        kind="own gradient" if _before_reduction(first) else "reduction",
        headline=headline,
        sentence=told.format(number),
    )


def _read_parts(first: Divergence) -> str:
    """What is to be said of the parts of sums that the line was given; "" if it was given none."""
    if first.adds_what_is_whole:
        return OF_WHOLE
    return OF_OWN_ROWS if first.reads_parts else ""


def _with_unreduced(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    left = [PointedLine(line, OWN_LEFT) for line in beside.left_unreduced]
    return replace(
        found,
        kind="reduction",
        headline="gradients are not reduced" + (" in time" if beside.at_each_step else ""),
        sentence="Each rank has its own gradients "
        + ("when the optimizer steps" if beside.at_each_step else "in the end")
        + "; one rank has the mean or sum of them.",
        lines=first_of_each_line([*lines_of_no_sync(view), *left]),
        is_right_alone=True,
    )


def _is_only_backward(beside: BesideOneRank) -> bool:
    """True if gradients are lost at collectives, and no value of the forward pass parts."""
    in_backward = all(one.operation.in_backward and one.alone for one in beside.divergences)
    return bool(beside.past_autograd) and in_backward


def _with_backward(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    note = "of what has a gradient; autograd does not know of it"
    lines = [
        PointedLine(one.line, f"{called(one)} {note}", is_fault=True)
        for one in beside.past_autograd
        if one.line is not None
    ]
    begins = [backward_begins(one.line) for one in view.observed.calls.backwards[:1]]
    return replace(
        found,
        kind="own gradient",
        headline="a collective loses a gradient",
        sentence=f"Autograd does not know that line {lines[0].line.number} sends what has a "
        "gradient, so nothing comes back for what other ranks make of it. No value of the forward "
        "pass was seen to part from one rank, only gradients.",
        lines=first_of_each_line([*lines, *begins]),
        fix="use a collective that autograd knows (torch.distributed.nn.functional).",
        is_right_alone=True,
        what="something else",
    )


def _is_before_backward(beside: BesideOneRank) -> bool:
    """True if a value that leads to wrong gradients parts before anything is reduced."""
    first = beside.divergences[0]
    return first.is_certain and first.is_first and first.alone is not None


def _with_lines(
    found: Whereabouts, beside: BesideOneRank, pointed: Sequence[PointedLine], view: View
) -> Whereabouts:
    """A line that was found already comes first, unless it is only that of the loss, or the call of
    backward, which is all that is seen of what DDP reduces.
    """
    backwards = {one.line for one in view.observed.calls.backwards}
    faults = [one for one in found.lines if one.is_fault]
    others = [one for one in found.lines if not one.is_fault]
    first = beside.divergences[0]
    behind: list[PointedLine] = []
    if not (pointed[0].is_fault and first.is_given_right_values):
        is_right = beside.names.is_right
        behind = lines_behind(run_lines(view, 0), pointed[0].line, MOST_LINES, is_right)
    notes = {one.line: one.note for one in found.lines if one.note}
    only_ranks = {one.operation.line for one in beside.divergences if one.alone is None}
    pointed = [
        replace(one, note=notes.get(one.line, one.note)) if one.line in only_ranks else one
        for one in pointed
    ]
    # The line that writes other numbers is not that which makes them.
    is_late = found.kind == "reduction" and _is_before_backward(beside)
    is_late |= found.what == "no weighted sum" and pointed[0].line not in backwards
    is_vague = found.shows_later or found.kind == "big batch" or is_late
    if not is_vague and any(one.line not in backwards for one in faults):
        seen = [replace(one, is_fault=False) for one in pointed]
        lines = first_of_each_line([*faults, *seen, *others])
        return replace(found, lines=lines, is_right_alone=True)
    seen = [replace(one, is_fault=False) for one in faults]
    is_marked = any(one.is_fault for one in pointed)
    if is_marked and found.shows_later and first.alone is not None:
        others = []  # they are the loss, and what is behind it
    lines = first_of_each_line([*pointed, *behind, *seen, *others])
    marks = LOOK_FIRST if is_marked else ""
    fix = "" if found.what == "right ones changed" else found.fix  # another line is marked now
    if found.what == "loss of rows" and pointed[0].is_fault:
        headline = f"line {pointed[0].line.number} has other values than on one rank"
        found = replace(found, headline=headline)
    return replace(found, lines=lines, is_right_alone=True, marks=marks, fix=fix)


def _before_reduction(divergence: Divergence) -> bool:
    return divergence.operation.in_backward or divergence.operation.differentiable


def lines_of_divergences(beside: BesideOneRank, view: View) -> tuple[PointedLine, ...]:
    """The lines of the divergences. Those inside backward passes follow from others, if there are
    any, and have no line but that of the call of backward.
    """
    found = [one for one in beside.divergences if not is_of_torch(one.operation)]
    certain = [one for one in found if one.is_certain]
    outside = [one for one in certain if not one.operation.in_backward]
    uncertain = [one for one in found if not one.is_certain]
    lines: list[PointedLine] = []
    is_sharded = bool(sharded_names(view))
    backwards = {one.line for one in view.observed.calls.backwards}
    first = outside or certain
    # What is made of numbers of Python is wrong before: the lines behind it tell more than others.
    most = 1 if first and first[0].operation.name in NUMBERS else MOST_DIVERGENCES
    for one in (*first[:most], *uncertain):
        if one.operation.line is not None:
            is_call = one.operation.in_backward and one.operation.line in backwards
            is_right = is_call or _is_a_mean(one) or beside.is_right(one.operation.line)
            is_right |= is_sharded and _is_issued_by_torch(one)
            tells_nothing = is_call and one.joined is None and one.alone is not None
            note = OTHER_GRADIENTS if tells_nothing else _note_of_divergence(one, view.world_size)
            is_fault = one.is_certain and not is_right and not _has_no_part(one)
            leads_away = bool(lines) and is_right and not one.is_certain  # it only looks wrong
            if not leads_away:
                lines.append(PointedLine(one.operation.line, note, is_fault))
            lines += [PointedLine(line, OWN_LEFT) for line in dict.fromkeys(one.unreduced)]
        lines += [PointedLine(line, MULTIPLE) for line in one.multiples if line not in backwards]
    return first_of_each_line(lines)


SENDING = (
    *("all_", "broadcast", "gather", "reduce", "scatter"),
    *("batch_", "isend", "irecv", "send", "recv"),
)
"""With these the names of functions begin that exchange tensors."""

WAITS = "wait_tensor"
"""The operation with which a DTensor waits for an exchange."""


def _is_issued_by_torch(divergence: Divergence) -> bool:
    """True for an exchange of tensors that runs only where there are several ranks, in a line that
    calls no function for it: FSDP and DTensors gather and reduce as they should.
    """
    operation = divergence.operation
    if divergence.alone is not None or divergence.runs[-1] or operation.line is None:
        return False
    place = place_at(operation.line)
    calls = ast.walk(place.statement) if place is not None else ()
    exchanges = any(called_name(one).startswith(SENDING) for one in calls)
    return (operation.talks or operation.name == WAITS) and not exchanges


def is_of_torch(operation: Operation) -> bool:
    """True for places that a module of torch counts, not the line that calls it, and for the bytes
    of objects that a collective sends: neither are values of the step.
    """
    place = None if operation.line is None else place_at(operation.line)
    text = "" if place is None else ast.unparse(place.statement)
    return "_object(" in text or (operation.name == "arange" and "range(" not in text)


def _has_no_part(divergence: Divergence) -> bool:
    """True if the ranks have no part of what one rank has: they may pad to another length."""
    alone = divergence.alone
    if alone is None or divergence.apart is not None or divergence.joined is not None:
        return False
    return any(one.shape != alone.shape for one in divergence.by_rank)


def _is_a_mean(divergence: Divergence) -> bool:
    """True for a mean of rows, which over fewer rows may be right, if it is weighted later."""
    operation, alone = divergence.operation, divergence.alone
    return alone is not None and alone.tensor.numel() == 1 and makes_a_mean(operation)


def _note_of_divergence(divergence: Divergence, world_size: int) -> str:
    """Says what the operation returned on one rank, and what it returned on the others."""
    name = called(divergence.operation)
    if divergence.alone is None:
        *ranks, once = divergence.runs
        least, most = min(ranks), max(ranks)
        if least < most:
            here, there = ranks.index(least), ranks.index(most)
            return f"{name}: runs {_times(least)} on rank {here}, {_times(most)} on rank {there}"
        if not once:
            return f"{name}: runs only where there are several ranks"
        if most == once:
            return f"{name}: runs otherwise than on one rank"
        return f"{name}: runs {_times(most)} on a rank, {_times(once)} on one rank"
    if divergence.joined is not None:
        rank, one, other = divergence.joined
        return f"{name}: rank {rank} joins the row of example {one} with that of example {other}"
    if divergence.taken is not None and divergence.elsewhere is not None:
        rank = next(
            rank
            for rank, (here, there) in enumerate(
                zip(divergence.taken.of_rank, divergence.elsewhere.of_rank, strict=True)
            )
            if here != there
        )
        takes, elsewhere = (
            positions_text(one.of_rank[rank]) for one in (divergence.taken, divergence.elsewhere)
        )
        return f"{name}: rank {rank} takes {takes} here, and {elsewhere} elsewhere"
    whole = divergence.alone.tensor
    parts = [one.tensor for one in divergence.by_rank]
    if divergence.apart is not None:
        at, *numbers = divergence.apart
        ours, theirs = (text_of(one, ".3g") for one in numbers)
        if divergence.operation.name in ORDERING:  # what is first on a rank has no such place
            return f"{name}: on some ranks no part of one rank's value"
        return f"{name}: rank {at} has {ours}, and one rank {theirs} there"
    if _has_no_part(divergence):
        return f"{name}: on some ranks no part of one rank's value"
    element = 0
    if whole.numel() > 1:
        spread = sum(((part - whole).abs() for part in parts), torch.zeros_like(whole))
        element = _first_of_largest(spread)
    shown = ", ".join(text_of(float(part.flatten()[element]), ".3g") for part in parts[:MOST_SHOWN])
    more = ", ..." if world_size > MOST_SHOWN else ""
    if whole.numel() == 1 and divergence.alone.is_floating_point:
        more += f" (mean {text_of(sum(map(float, parts)) / len(parts), '.3g')})"
    which = f", element {element}" if whole.numel() > 1 else ""
    alone = text_of(float(whole.flatten()[element]), ".3g")
    return f"{name}{which}: {alone} on one rank, here {shown}{more}"


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _first_of_largest(values: Tensor) -> int:
    """The place of the largest value; of several that are equal up to rounding, the first."""
    largest = values.flatten() >= (1 - ROUNDING) * values.max()
    return int(largest.int().argmax())


# The lines at which a step leaves the loss of the case, with what they compute there.


def with_unlike_loss(
    found: Whereabouts,
    unlike: Sequence[Unlike],
    view: View,
    beside: BesideOneRank,
    *,
    knows_numbers: bool,
) -> Whereabouts:
    """The place that was found already, after the lines at which the step leaves the case's loss.

    Nothing is added where the losses are right. ``knows_numbers``: the lines that were found make
    the numbers by which the loss is scaled.
    """
    if found.kind == "big batch" or not unlike:
        return found
    backwards = {one.line for one in view.observed.calls.backwards}
    unlike = sorted(unlike, key=lambda one: not one.joined and beside.is_right(one.line))
    calls = [one.operation.in_backward and one.line in backwards for one in unlike]
    first = [
        PointedLine(one.line, _note_of_value(one, is_call), not is_call)
        for one, is_call in zip(unlike, calls, strict=True)
    ]
    first = [replace(one, is_fault=False) if beside.is_right(one.line) else one for one in first]
    is_told = found.kind == "not seen" or (found.what == "loss of rows" and found.shows_later)
    if is_told and calls[0]:
        first[0] = replace(first[0], note="")  # the headline says it
    behind, joining = list(_made_before(unlike)), unlike[0] if unlike[0].joined else None
    if joining is not None and not joining.moved_at:
        behind = [*lines_behind(run_lines(view, 0), joining.line, 1), *behind]
    known = [one for one in found.lines if one.is_fault]
    if known and not found.shows_later:  # a line that was seen to do something wrong comes first
        more = [one for one in found.lines if not one.begins_backward]
        ordered = [*more, *first, *behind, *found.lines]
    else:
        others = [replace(one, is_fault=False) for one in found.lines]
        nearest = [] if knows_numbers else behind[:1]
        own = _lines_of_own_backwards(view) if all(calls) else []
        ordered = [*(own or first), *nearest, *others, *behind]
    if is_told:
        what = "computes what the loss of the case does not"
        if joining is not None:
            what = "joins different examples"
        elif unlike[0].operation.in_backward:
            what = "has other gradients in backward than the loss of the case"
        headline = f"line {first[0].line.number} {what}"
        if beside.is_right(first[0].line) and joining is None:
            headline = "the loss is given other values than in the big batch"
        sentence = found.sentence if found.what == "loss of rows" else ""
        found = replace(found, kind="own gradient", headline=headline, sentence=sentence)
    return replace(
        found,
        lines=first_of_each_line(ordered),
        is_right_alone=None if view.world_size == 1 else beside.is_right_alone,
        marks=LOOK_FIRST if any(one.is_fault for one in ordered) else "",
    )


def _made_before(unlike: Sequence[Unlike]) -> Iterator[PointedLine]:
    """The lines that made what the operations were given."""
    for one in unlike:
        yield from (PointedLine(line, MOVES_ROWS) for line in one.moved_at)
        note = f"goes into what line {one.line.number} computes"
        yield from (PointedLine(line, note) for line in one.made_at)


def _note_of_value(one: Unlike, is_call: bool) -> str:
    """Says what the operation returned, and what that of the loss of the case returns instead; of
    the call of backward only that it does.
    """
    name, here = called(one.operation), one.value.tensor
    if one.joined is not None:
        return "{} joins the row of example {} with that of example {}".format(name, *one.joined)
    if is_call:
        return OTHER_IN_BACKWARD
    if one.in_loss is None:
        if here.numel() == 1:
            number = text_of(float(here), ".5g")
            return f"{name} gives {number}, which the loss of the case does not have"
        return f"{name} gives values that the loss of the case does not have"
    there = one.in_loss.tensor
    element = int((here - there).abs().argmax())
    which = f", element {element}" if here.numel() > 1 else ""
    ours, theirs = (text_of(float(one.flatten()[element]), ".4g") for one in (here, there))
    return f"{name}{which}: {ours} here, {theirs} in the loss of the case"


# One rank holds the same multiple of the big batch's gradient as the others: its loss is wrong.


def must_be_the_loss(beside: BesideOneRank, view: View) -> bool:
    """True if the ranks hold the same multiple as one rank, and only backward and reductions have
    changed their gradients, so that the loss must have this factor.

    Where hooks or backward methods of the user's own run, the loss must be seen to have it.
    """
    factor = beside.factor_alone
    if factor is None or (view.observed.calls.changes() and not beside.is_left_by_backward):
        return False
    hooks = view.observed.calls.places(Kind.TENSOR_HOOK, Kind.HOOK)
    is_hooked = hooks or any(one.own_backwards for one in view.observed.by_rank.values())
    if is_hooked and not (view.examples.big_batch_loss and has_right_loss(beside, view, factor)):
        return False
    return all(
        unexplained(held, factor * view.expected) < NEGLIGIBLE for held in view.measured.by_rank
    )


def has_right_loss(beside: BesideOneRank, view: View, factor: float = 1.0) -> bool:
    """True if backward began, on one rank, at so many times the loss of the big batch."""
    right = factor * view.examples.big_batch_loss
    return beside.loss_alone is not None and same_loss(beside.loss_alone, right)


def wrong_loss(found: Whereabouts, beside: BesideOneRank, view: View) -> Whereabouts:
    """On one rank, where a reduction changes nothing, all gradients have a wrong factor, too."""
    factor = beside.factor_alone or 0.0
    numbers = [*_lines_of_scalings(beside.scalings, factor)]
    is_open = not any(one.is_fault for one in numbers)
    loss = line_of_loss(view, "the loss that backward begins at", is_open)
    run = run_lines(view, 0)
    lines = [
        *([loss] if loss is not None and is_open else []),
        *numbers,
        *(_lines_of_divisor(run, loss.line) if loss is not None else []),
        *(lines_behind(run, loss.line, MOST_LINES) if loss is not None and is_open else []),
    ]
    return replace(
        found,
        kind="own gradient",
        headline=f"the loss has a wrong factor, {text_of(factor, '.4g')}",
        sentence=f"On one rank every gradient is {text_of(factor, '.6g')} times that of the big "
        "batch, too. So the loss is multiplied, or divided by another number, and gradients are "
        "reduced rightly.",
        lines=first_of_each_line(lines),
        fix="",
        is_right_alone=None,
        shows_later=True,
        what="something else",
    )


def _lines_of_scalings(scalings: Sequence[Scaling], factor: float) -> Iterator[PointedLine]:
    """The lines that made the numbers by which the loss was scaled, those first of which another
    count would give the right loss. If that is true of one alone, it is marked.
    """
    made = [one for one in scalings if one.made_at and abs(one.number) != 1]
    wrong = the_wrong_count(scalings, factor)
    for one in sorted(made, key=lambda one: not one.explains(factor)):
        how = "divides" if one.divides else "multiplies"
        note = f"makes {text_of(one.number, '.6g')} on one rank; line {one.line.number} {how} by it"
        for line in one.made_at:
            is_fault = one is wrong and line == one.made_at[0]
            yield PointedLine(line, note, is_fault)


def the_wrong_count(scalings: Sequence[Scaling], factor: float) -> Scaling | None:
    """The number in whose place another count would give the right loss, if there is but one."""
    found = [one for one in scalings if one.made_at and one.explains(factor)]
    return found[0] if len(found) == 1 and abs(found[0].number) != 1 else None


def _lines_of_divisor(run: RunLines, line: CodeLine) -> Iterator[PointedLine]:
    """The lines that made the divisor of the loss, as far as the source shows: first the nearest
    one that computes it, and then the nearest.
    """
    found = divisors(run, line)
    computed = [one for one in found if one.computes]
    for one in dict.fromkeys([*computed[:1], *found[:1]]):
        yield PointedLine(one.line, one.gives if one.name else "")
