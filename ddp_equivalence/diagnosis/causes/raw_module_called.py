"""The model was called directly, not through its wrapper."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes import no_all_reduce
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, indication_if
from ddp_equivalence.diagnosis.lines.of_reduction import lines_past_the_wrapper
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


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


def lines(view: View) -> Sequence[PointedLine]:
    """Where the model is wrapped, and where it is called without the wrapper."""
    calls = view.observed.calls
    wrapped = calls.places(Kind.WRAP)
    wrappers = {place.first.what for place in wrapped}
    direct = calls.places(Kind.FORWARD, where=lambda call: call.what not in wrappers)
    called = [
        PointedLine(place.first.chosen_at or place.line, "the module itself is called", True)
        for place in direct[:1]
    ]
    past = lines_past_the_wrapper(view) if not called else []
    return in_order(
        view, *(place.pointed("the wrapper is made") for place in wrapped[-1:]), *called, *past
    )


def fix(view: View) -> str:
    """Call the wrapper."""
    return "call the DistributedDataParallel in the forward pass, not the module that it wraps."


HYPOTHESIS = Hypothesis(
    name="raw_module_called",
    sentence="The model was called directly, not through its DistributedDataParallel, whose hooks "
    "then never fire.",
    look_at="the forward pass: call ddp(...), not ddp.module(...) or the model that was wrapped",
    predict=no_all_reduce.predict,
    indication=indication,
    tell_apart=no_all_reduce.TELL_APART,
    headline="the module is called, not its wrapper",
    lines=lines,
    fix=fix,
)
