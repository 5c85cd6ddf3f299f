"""As many elements were all-reduced as the parameters have, but no gradient."""

from __future__ import annotations

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Counts the elements that were reduced, unless DDP reduced gradients itself."""
    reduced, elements = view.observed.reduced_elements, view.parameters.total
    if reduced is None:
        return None
    if any(
        any(wrapper.synchronised) and "comm_hook" not in wrapper.logged
        for wrapper in view.observed.wrappers
    ):
        return Indication(False, "DistributedDataParallel reduced gradients")
    return indication_if(
        reduced >= elements,
        f"{reduced} elements were all-reduced, enough for the {elements} of the parameters, but no "
        "gradient",
        f"only {reduced} elements were all-reduced, too few for the {elements} of the parameters",
    )


HYPOTHESIS = Hypothesis(
    name="parameters_reduced_not_gradients",
    sentence="Parameters were all-reduced where gradients were meant: every rank holds the "
    "gradient of its own shard.",
    look_at="what is given to all_reduce: parameter.grad, not parameter or parameter.data",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
)
