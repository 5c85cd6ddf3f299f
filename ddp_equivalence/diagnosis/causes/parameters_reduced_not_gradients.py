"""Parameters were all-reduced, and no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, indication_if
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.reduced import gradients_were_reduced, reduced_parameters
from ddp_equivalence.diagnosis.setting import REDUCING, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Contents, Kind


def indication(view: View) -> Indication | None:
    """Looks for parameters among the tensors that were reduced."""
    if not view.observed.by_rank:
        return None
    if gradients_were_reduced(view):
        return Indication(False, "gradients, or copies of them, were reduced")
    names = reduced_parameters(view)
    count = len(names)
    return indication_if(
        bool(names),
        f"{count} {'parameter was' if count == 1 else 'parameters were'} all-reduced, and no "
        "gradient",
        "no parameter was all-reduced",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """Where parameters are all-reduced."""
    places = view.observed.calls.places(Kind.COLLECTIVE, where=_reduces_parameters)
    return [
        place.pointed(
            f"reduces {counted(len(place.names), 'parameter')} ({names_text(place.names)}), "
            "not their gradients",
            is_fault=True,
        )
        for place in places[:2]
    ]


def _reduces_parameters(call: Call) -> bool:
    collective = call.collective
    return (
        collective is not None
        and collective.op in REDUCING
        and collective.contents in (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)
    )


def fix(view: View) -> str:
    """Reduce the gradients."""
    return f"all_reduce parameter.grad, not parameter, and divide it by {view.world_size}."


def predict(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient."""
    return () if gradients_were_reduced(view) else no_all_reduce.kept_local(view)


HYPOTHESIS = Hypothesis(
    name="parameters_reduced_not_gradients",
    sentence="Parameters were all-reduced where gradients were meant: every rank holds the "
    "gradient of its own shard.",
    look_at="what is given to all_reduce: parameter.grad, not parameter or parameter.data",
    predict=predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
    headline="parameters are all-reduced, not gradients",
    lines=lines,
    fix=fix,
)
