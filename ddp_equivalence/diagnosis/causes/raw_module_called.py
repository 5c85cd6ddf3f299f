"""The model was called past its wrapper."""

from __future__ import annotations

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def sign(view: View) -> Sign | None:
    if not view.observed:
        return None
    found = indications.wrappers(view)
    if not found:
        return Sign(False, "there was no DistributedDataParallel")
    forwards = sum(len(one.synchronised) for one in found)
    return indications.only_if(
        forwards == 0,
        "the model was called, its DistributedDataParallel never",
        "DistributedDataParallel itself was called",
        decides=True,
    )


HYPOTHESIS = Hypothesis(
    name="raw_module_called",
    sentence="The model was called past its DistributedDataParallel, whose hooks then never fire.",
    look_at="the forward pass: ddp(...), not ddp.module(...) nor the model that was wrapped",
    predict=no_all_reduce.predict,
    sign=sign,
    tell_apart=no_all_reduce.TELL_APART,
)
