"""Some parameters, which are no whole buckets, kept the rank's own gradient."""

from __future__ import annotations

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.causes import bucket_not_reduced
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def sign(view: View) -> Sign | None:
    ignored = {name for one in indications.wrappers(view) for name in one.ignored}
    if ignored and view.differing <= ignored:
        return Sign(True, "DDP was told to ignore them")
    sent = indications.reduced_elements(view)
    elements = sum(view.selection.sizes.values())
    missing = sum(view.selection.sizes[name] for name in view.differing)
    if not indications.wrappers(view) and sent == elements - missing:
        return Sign(True, f"{sent} of {elements} elements were all-reduced: all but theirs")
    concerned = bucket_not_reduced.buckets_concerned(view)
    if concerned is not None and any(len(bucket) > 1 for bucket in concerned):
        return Sign(False, "they are whole buckets of DDP")
    return None


HYPOTHESIS = Hypothesis(
    name="parameter_not_reduced",
    sentence="Some parameters were not reduced: every rank holds its own gradient of them.",
    look_at="the loop, list or hand-written bucket that feeds all_reduce; under DDP, parameters "
    "replaced or added after the model was wrapped, told to be ignored, or unused in the first "
    "iteration",
    predict=bucket_not_reduced.predict,
    sign=sign,
    tell_apart="buckets of several parameters (a larger bucket_cap_mb)",
)
