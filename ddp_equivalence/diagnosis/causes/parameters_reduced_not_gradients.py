"""As much was all-reduced as there are parameters, but no gradient."""

from __future__ import annotations

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def sign(view: View) -> Sign | None:
    sent = indications.reduced_elements(view)
    if sent is None:
        return None
    elements = sum(view.selection.sizes.values())
    if any(
        any(one.synchronised) and "comm_hook" not in one.logged
        for one in indications.wrappers(view)
    ):
        return Sign(False, "DistributedDataParallel reduced gradients")
    return indications.only_if(
        sent >= elements,
        f"{sent} elements were all-reduced for {elements} of parameters, none of them a gradient",
        f"only {sent} elements were all-reduced for {elements} of parameters",
    )


HYPOTHESIS = Hypothesis(
    name="parameters_reduced_not_gradients",
    sentence="Parameters were all-reduced where gradients were meant: every rank holds the "
    "gradient of its own shard.",
    look_at="what is given to all_reduce: parameter.grad, not parameter or parameter.data",
    predict=no_all_reduce.predict,
    sign=sign,
    tell_apart=no_all_reduce.TELL_APART,
)
