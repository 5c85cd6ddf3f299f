"""Some parameters were not reduced, and they are not whole buckets of DDP."""

from __future__ import annotations

from ddp_equivalence.diagnosis.causes import bucket_not_reduced
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Compares the parameters that differ with what DDP ignores, and with what was reduced."""
    differing, wrappers = view.measured.differing, view.observed.wrappers
    ignored = {name for wrapper in wrappers for name in wrapper.ignored}
    if ignored and differing <= ignored:
        return Indication(True, "DDP was told to ignore these parameters")
    reduced, elements = view.observed.reduced_elements, view.parameters.total
    if not wrappers and reduced == elements - view.parameters.total_of(differing):
        because = f"{reduced} of {elements} elements were all-reduced: all except theirs"
        return Indication(True, because)
    buckets = bucket_not_reduced.differing_buckets(view)
    if buckets is not None and any(len(bucket) > 1 for bucket in buckets):
        return Indication(False, "the parameters that differ are whole buckets of DDP")
    return None


HYPOTHESIS = Hypothesis(
    name="parameter_not_reduced",
    sentence="Some parameters were not reduced: every rank holds its own gradient of them.",
    look_at="the loop, list or hand-written bucket that feeds all_reduce; under DDP, parameters "
    "that were replaced or added after the model was wrapped, that DDP was told to ignore, or that "
    "were unused in the first iteration",
    predict=bucket_not_reduced.unreduced_in_part,
    indication=indication,
    tell_apart="Use buckets of several parameters (a larger bucket_cap_mb).",
)
