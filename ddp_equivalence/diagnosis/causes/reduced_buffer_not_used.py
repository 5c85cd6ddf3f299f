"""Copies of gradients were reduced, and the result never got back into ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.lines_around_reduction import lines_that_left_out
from ddp_equivalence.diagnosis.lines.lines_into_temporaries import lines_into_temporaries
from ddp_equivalence.diagnosis.lines.words_of_lines import names_text
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Contents, Kind


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
            assert call.collective is not None
            unused |= set(call.collective.names)
        elif call.kind is Kind.COLLECTIVE and call.collective is not None:
            if call.collective.contents is Contents.GRADIENTS:
                unused -= set(call.collective.names)
        elif call.change is not None and call.change.factor is None:
            unused -= set(call.change.names)
    return frozenset(unused)


def _reduces_copies(call: Call) -> bool:
    collective = call.collective
    return (
        collective is not None
        and reduces_gradients(call)
        and collective.contents is Contents.COPIES_OF_GRADIENTS
        and len(collective.ranks) > 1
    )


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


def _reductions(view: View) -> list[Place]:
    return view.observed.calls.places(Kind.COLLECTIVE, where=_reduces_copies)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the copies are reduced."""
    shown = []
    for place in _reductions(view)[:2]:
        collective = place.first.collective
        assert collective is not None
        elements = sum(call.collective.elements for call in place.calls if call.collective)
        copies = f"{len(place.names)} gradient{'s' if len(place.names) > 1 else ''}"
        note = f"reduced {elements} elements: copies of {copies}, not the gradients themselves"
        shown.append(
            place.pointed(note, is_fault=True, missing="copy the result back into each .grad")
        )
    temporaries = lines_into_temporaries(view, names_text(sorted(_copied_and_not_used(view))))
    if temporaries:
        return [*(replace(one, is_fault=False, missing="") for one in shown[:1]), *temporaries]
    return [*shown, *_lines_that_write_others(view)]


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
    where = f"after line {places[-1].line.number} " if places else ""
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
