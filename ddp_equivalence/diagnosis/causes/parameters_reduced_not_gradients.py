"""Parameters were all-reduced, and no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.reduced import gradients_were_reduced, reduced_parameters
from ddp_equivalence.diagnosis.view import View


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
)
