"""The model was called directly, not through its wrapper."""

from __future__ import annotations

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.indications import indication_if
from ddp_equivalence.diagnosis.view import View


def indication(view: View) -> Indication | None:
    """Counts the forward passes of every DistributedDataParallel."""
    if not view.observed.by_rank:
        return None
    wrappers = view.observed.wrappers
    if not wrappers:
        return Indication(False, "there was no DistributedDataParallel")
    return indication_if(
        not any(wrapper.synchronised for wrapper in wrappers),
        "the model was called, but its DistributedDataParallel never was",
        "DistributedDataParallel itself was called",
        conclusive=True,
    )


HYPOTHESIS = Hypothesis(
    name="raw_module_called",
    sentence="The model was called directly, not through its DistributedDataParallel, whose hooks "
    "then never fire.",
    look_at="the forward pass: call ddp(...), not ddp.module(...) or the model that was wrapped",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
)
