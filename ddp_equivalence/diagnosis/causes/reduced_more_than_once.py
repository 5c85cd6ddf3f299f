"""Gradients that were added up over ranks already are added up over the same ranks once more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_reduction import way_to
from ddp_equivalence.diagnosis.lines.origins import chosen, gone_through
from ddp_equivalence.diagnosis.lines.source_tree import run_lines
from ddp_equivalence.diagnosis.lines.sources import lines_that_put_into
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.reduced import Repeated, sums_repeated
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind


def predict(view: View) -> Sequence[Prediction]:
    """The big batch, in which what went into several sums counts once more for each rank."""
    repeated = _wrong(view)
    if not repeated:
        return ()
    predicted = view.expected.clone()
    gradients = None
    for name, one in repeated.items():
        place = view.parameters.places[name]
        if len(set(one.counts)) == 1:
            predicted[place] = one.counts[0] * view.expected[place]
            continue
        gradients = gradients if gradients is not None else _by_backward(view)
        if gradients is None or len(gradients) != len(one.counts):
            return ()
        weight = _weight(view.expected, gradients.sum(0))
        if weight is None:
            return ()
        counts = torch.tensor(one.counts, dtype=gradients.dtype)
        predicted[place] = weight * (counts @ gradients)[place]
    return (Prediction(view.on_every_rank(predicted), names_text(sorted(repeated))),)


def _wrong(view: View) -> dict[str, Repeated]:
    """What was added up again, if all that differs is among it."""
    repeated = sums_repeated(view)
    if not view.measured.differing or not view.measured.differing <= set(repeated):
        return {}
    return {name: one for name, one in repeated.items() if name in view.measured.differing}


def _by_backward(view: View) -> Tensor | None:
    """What the ranks computed together in each backward pass, shape (passes, elements)."""
    of_ranks = []
    for rank in range(view.world_size):
        calls = view.observed.backwards(rank)
        known = [one.gradient for one in calls if one.gradient is not None]
        if len(known) != len(calls) or any(len(one) != len(view.expected) for one in known):
            return None
        of_ranks.append(known)
    if len({len(one) for one in of_ranks}) != 1 or not of_ranks[0]:
        return None
    return torch.stack([torch.stack(one) for one in of_ranks]).sum(0)


def _weight(expected: Tensor, total: Tensor) -> float | None:
    """How many times the sum of all passes the big batch is; None if it is no multiple of it."""
    square = float(total @ total)
    weight = float(expected @ total) / square if square else 0.0
    return weight if weight and nearly_equal(weight * total, expected) else None


def indication(view: View) -> Indication | None:
    """Looks for gradients that went into two sums over the same ranks."""
    repeated = _wrong(view)
    if not repeated:
        return None
    most = max(len(one.calls) for one in repeated.values())
    because = f"the same gradients went into {most} sums over the same ranks"
    return Indication(True, because, all(map(_at_once, repeated.values())))


def _at_once(one: Repeated) -> bool:
    """True if two sums of one gradient returned a handle in the same backward pass.

    They may then run at the same time, and nobody can say what the gradient is afterwards.
    """
    passes = [
        call.backwards
        for call in one.calls
        if call.collective is not None and call.collective.asynchronous
    ]
    return len(passes) > len(set(passes))


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are added up again, and what decided that this is done."""
    repeated = _wrong(view)
    names = names_text(sorted(repeated))
    places = _places(view, repeated)
    if not places:
        return []
    again = places[-1]
    if len(places) > 1:
        return [
            places[0].pointed(f"all_reduces {names}"),
            again.pointed("adds up the same gradients again", is_fault=True),
        ]
    times = max(len(one.calls) for one in repeated.values())
    note = f"all_reduces {names} {times} times"
    listed = chosen(gone_through(run_lines(view, again.ranks[0]), way_to(view, again.first)))
    lists = [PointedLine(listed.line, "makes what the loop goes through")] if listed else []
    return [*lines_that_put_into(view, again), again.pointed(note, is_fault=True), *lists]


def _places(view: View, repeated: dict[str, Repeated]) -> list[CallSite]:
    """The lines that add these gradients up, in the order in which they came to them."""
    calls: set[Call] = {call for one in repeated.values() for call in one.calls}
    return view.observed.calls.places(Kind.COLLECTIVE, where=lambda call: call in calls)


def fix(view: View) -> str:
    """Once."""
    repeated = _wrong(view)
    if any(1 in one.counts for one in repeated.values()):
        return "reduce each gradient once, after the last backward pass that adds to it."
    return f"reduce {names_text(sorted(repeated))} once in a step, not several times."


HYPOTHESIS = Hypothesis(
    name="reduced_more_than_once",
    sentence="Gradients that were already added up over ranks were added up over the same ranks "
    "once more.",
    look_at="the loop or the hooks that all-reduce: a tied weight that is listed under each of its "
    "names, a second loop over the same gradients, or a reduction after every micro-batch of a "
    "window",
    predict=predict,
    indication=indication,
    tell_apart="Use another world size: no other cause has a factor that changes with it.",
    headline="gradients are reduced more than once",
    lines=lines,
    fix=fix,
)
