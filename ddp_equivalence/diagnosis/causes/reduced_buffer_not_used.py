"""Copies of gradients were reduced, and the result never got back into ``.grad``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_gradients import lines_into_temporaries
from ddp_equivalence.diagnosis.lines.of_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.source_tree import called_name, inside, place_of
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.setting import REDUCING, CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, CodeLine, Contents, Kind

NEAR = 3
"""A line so near to the one that is shown is seen anyway."""


def predict(view: View) -> Sequence[Prediction]:
    """The local gradients of the parameters that were reduced as copies; the others are right."""
    copied = _copied_and_not_used(view)
    if not copied or not view.setting.every_rank_reports:
        return ()
    predictions = []
    for local in view.local_gradients:
        for divisor, detail in ((1, ""), (view.world_size, f"divided by {view.world_size}")):
            held = view.on_reporting_ranks(local / divisor)
            if not copied >= set(view.parameters.names):
                held = view.parameters.combined(held, view.expected_by_rank, copied)
            predictions.append(Prediction(held, detail))
    return tuple(predictions)


def _copied_and_not_used(view: View) -> frozenset[str]:
    """The parameters whose gradients each rank reduced as copies, and did not write afterwards."""
    if not view.observed.covers_every_rank or view.world_size == 1:
        return frozenset()
    by_rank = [_of_rank(view.observed.calls.of(rank)) for rank in range(view.world_size)]
    return frozenset.intersection(*by_rank)


def _of_rank(calls: Sequence[Call]) -> frozenset[str]:
    unused: set[str] = set()
    for call in calls:
        if _reduces_copies(call):
            unused |= set(_copied_by(call))
        elif call.kind is Kind.COLLECTIVE and call.collective is not None:
            if call.collective.contents is Contents.GRADIENTS:
                unused -= set(call.collective.names)
        elif call.change is not None and call.change.factor is None:
            unused -= set(call.change.names)
    return frozenset(unused)


def _reduces_copies(call: Call) -> bool:
    collective = call.collective
    if collective is None or collective.op not in REDUCING or len(collective.ranks) < 2:
        return False
    return collective.contents is Contents.COPIES_OF_GRADIENTS or bool(collective.parts_of)


def _copied_by(call: Call) -> tuple[str, ...]:
    """The parameters of whose gradients a collective reduces copies, or copies of some elements."""
    return () if call.collective is None else call.collective.names or call.collective.parts_of


def indication(view: View) -> Indication | None:
    """Looks for copies of gradients that were reduced, and gradients that did not change then."""
    copied = _copied_and_not_used(view)
    if not copied:
        return None
    count, total = len(copied), len(view.parameters.names)
    return Indication(
        True,
        f"copies of {count} of {total} gradients were reduced, and these gradients were not "
        "written afterwards",
    )


def _reductions(view: View) -> list[CallSite]:
    unused = _copied_and_not_used(view)

    def is_unused(call: Call) -> bool:
        return _reduces_copies(call) and bool(unused & set(_copied_by(call)))

    return view.observed.calls.places(Kind.COLLECTIVE, where=is_unused)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the copies are made and reduced."""
    shown = [one for place in _reductions(view)[:2] for one in _lines_of(place)]
    temporaries = lines_into_temporaries(view, names_text(sorted(_copied_and_not_used(view))))
    if temporaries:
        return [*(replace(one, is_fault=False, missing="") for one in shown[:1]), *temporaries]
    return [*shown, *_lines_that_write_others(view)]


def _lines_of(place: CallSite) -> list[PointedLine]:
    """The line that reduces copies; before it those of the caller that made them, if it is one."""
    elements = sum(call.collective.elements for call in place.calls if call.collective)
    names = {name for call in place.calls for name in _copied_by(call)}
    copies = f"{counted(len(names), 'gradient')}, not the gradient{'s' if len(names) > 1 else ''}"
    is_part = any(call.collective.parts_of for call in place.calls if call.collective)
    what = "copies of parts" if is_part else "copies"
    note = f"reduced {elements} elements: {what} of {copies} themselves"
    missing = "copy the result back into each .grad"
    made, site = place.first.made_at, _site(place)
    whose = f"a copy of {'a part of ' if is_part else ''}.grad of {names_text(sorted(names))}"
    copying = f"makes what line {place.line.number} reduces: {whose}"
    if made is None and site is not None:
        note_of_site = f"gives {whose} to line {place.line.number}"
        return [PointedLine(site, note_of_site, True, missing), place.pointed(note)]
    if made is None or site is None:
        pointed = place.pointed(note, is_fault=True, missing=missing)
        far = made is not None and abs(made.number - place.line.number) > NEAR
        other = made if is_part or far else None
        return [pointed, *([PointedLine(other, copying, is_part)] if other is not None else [])]
    return [
        PointedLine(made, copying, True),
        PointedLine(site, f"leads to line {place.line.number}", True, missing),
        place.pointed(note.replace(" themselves", "")),
    ]


def _site(place: CallSite) -> CodeLine | None:
    """The line that gave the copies to the helper which reduces them; None if one function does
    both.
    """
    made, callers = place.first.made_at, place.first.callers
    given_by = callers[0] if callers and _is_given(place) else None
    if made is None:
        return given_by
    if _function_at(made) is _function_at(place.line):
        return None
    above = [one for one in callers if _function_at(one) is _function_at(made)]
    return next((one for one in above if one != made), given_by if not above else None)


def _function_at(line: CodeLine) -> object:
    """The function in whose source the line stands, also if it stands in a comprehension there."""
    place = place_of(line.file, line.number)
    return line.file if place is None or place.function is None else place.function


def _is_given(place: CallSite) -> bool:
    """True if the collective's tensor is an argument of the function that issues it."""
    at, collective = place_of(place.line.file, place.line.number), place.first.collective
    if at is None or at.function is None or collective is None:
        return False
    names = {one.arg for one in (*at.function.args.posonlyargs, *at.function.args.args)}
    return any(
        isinstance(node, ast.Call)
        and called_name(node) == collective.op
        and isinstance(node.args[0] if node.args else None, ast.Name)
        and node.args[0].id in names  # type: ignore[attr-defined]
        for node in (at.statement, *inside(at.statement))
    )


def _lines_that_write_others(view: View) -> list[PointedLine]:
    """The line that wrote other gradients, whose copies were reduced too, and what decided it."""
    unused = _copied_and_not_used(view)

    def writes(call: Call) -> bool:
        return call.change is not None and call.change.factor is None and call.backwards > 0

    for place in reversed(view.observed.calls.changes(writes)):
        if not unused & set(place.names):
            note = f"writes {names_text(place.names)}, not {names_text(sorted(unused))}"
            return [*lines_that_left_out(view, place), place.pointed(note, is_fault=True)]
    return []


def fix(view: View) -> str:
    """Copy the result back."""
    places = _reductions(view)
    if lines_into_temporaries(view, ""):
        return "copy the reduced tensor into .grad itself: p.grad.copy_(piece.view_as(p.grad))."
    after = (_site(places[-1]) or places[-1].line) if places else None
    where = f"after line {after.number} " if after is not None else ""
    return (
        f"{where}copy the reduced tensor back into each .grad, divided by {view.world_size} once."
    )


HYPOTHESIS = Hypothesis(
    name="reduced_buffer_not_used",
    sentence="Copies of the gradients were reduced, and the result was not written back: every "
    "rank holds the gradient of its own shard.",
    look_at="the flat buffer or temporary tensor that is given to all_reduce, and the lines after "
    "it, which must copy the result into parameter.grad",
    predict=predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
    headline="the all-reduced buffer is not used",
    lines=lines,
    fix=fix,
)
