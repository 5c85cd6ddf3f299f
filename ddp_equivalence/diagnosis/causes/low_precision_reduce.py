"""Gradients passed through a narrower type than their own, as in a reduction in that type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_reduction import hook_text, line_of_reduction
from ddp_equivalence.diagnosis.lines.origins import links_of_line
from ddp_equivalence.diagnosis.lines.source_tree import run_lines
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

NARROWER = (torch.bfloat16, torch.float16, torch.float32)

LARGEST_ERROR = 8.0
"""The largest relative error that rounding to the narrower type leaves, in eps of that type, for
each rank."""

LARGEST_FACTOR = 2.0
"""The largest factor that rounding leaves on all elements together, less 1, in eps of that type."""

NARROWER_BY = 64.0
"""A type is narrower if its eps is this many times that of the case's type."""

ENOUGH = 0.99
"""The part of the elements that must be values of the narrower type."""

LOGGED_NAMES = ("Half", "BFloat16", "c10::Half")
"""The names of the half-precision types in torch's flight recorder."""


def predict(view: View) -> Sequence[Prediction]:
    """The measurement itself, if nearly all its values are values of a narrower type.

    The rounding cannot be predicted; it is explained by the type.
    """
    measured = view.measured.by_rank
    if not view.measured.is_finite or not bool(measured.any()):
        return ()
    eps = torch.finfo(view.setting.dtype).eps
    error = float((measured - view.expected).norm() / measured.norm())
    for narrow in NARROWER:
        narrow_eps = torch.finfo(narrow).eps
        if narrow_eps < NARROWER_BY * eps:
            continue  # every value of the case's type would count as one of the narrower type
        if error > LARGEST_ERROR * narrow_eps * view.world_size:
            continue
        if abs((view.measured.factor or 0.0) - 1) > LARGEST_FACTOR * narrow_eps:
            continue  # rounding moves single elements, and not all of them alike
        # The sum may have been divided by the world size after it had been rounded.
        for multiple in (measured, measured * view.world_size):
            if _values_of_type(multiple, narrow, eps) >= ENOUGH:
                name = str(narrow).removeprefix("torch.")
                detail = f"at least {ENOUGH:.0%} of the values are values of {name}"
                return (Prediction(measured, detail, fitted=True),)
    return ()


def _values_of_type(values: Tensor, narrow: torch.dtype, eps: float) -> float:
    """The part of the elements that are values of this type, up to rounding in the case's type."""
    rounded = values.to(narrow).double()
    is_value = (rounded - values).abs() <= 4 * eps * values.abs()
    return float(is_value.double().mean())


def indication(view: View) -> Indication | None:
    """Looks for a reduction that ran in half precision."""
    logs = [seen.collectives or () for seen in view.observed.by_rank.values()]
    dtypes = {e.dtype for log in logs for e in log if "reduce" in e.op and e.elements > 1}
    narrow = sorted(name for name in dtypes if name in LOGGED_NAMES)
    return Indication(True, f"a reduction ran in {', '.join(narrow)}") if narrow else None


def lines(view: View) -> Sequence[PointedLine]:
    """Where gradients are reduced in a narrower type, or the hook that does so."""
    calls = view.observed.calls
    backwards = {place.line for place in calls.backwards}
    narrow = calls.places(Kind.COLLECTIVE, where=lambda call: _is_narrow(call, view))
    own = [
        place.pointed(f"reduces in {place.first.collective.dtype}", True)
        for place in narrow
        if place.first.collective is not None and place.line not in backwards
    ]
    if own:
        return [*_lines_that_narrow(view, narrow[-1]), *own[-1:]]
    hooks = [place.pointed(hook_text(place), True) for place in calls.places(Kind.HOOK)]
    if hooks:
        return hooks[-1:]
    return in_order(view, line_of_reduction(view, is_fault=True))


def _lines_that_narrow(view: View, place: CallSite) -> list[PointedLine]:
    """The line that made the tensor of a narrower type, and the one that made what it is made of.

    Empty if the line that reduces it has made it.
    """
    made_at = place.first.made_at
    if made_at is None or made_at == place.line:
        return []
    links = links_of_line(run_lines(view, place.ranks[0]), made_at)[1:2]
    return [
        *(
            PointedLine(one.line, f"sets {one.name}, which line {made_at.number} uses")
            for one in links
            if one.line != made_at
        ),
        PointedLine(made_at, "makes the tensor that is reduced"),
    ]


def _is_narrow(call: Call, view: View) -> bool:
    """True if the call reduced more than one element in a narrower type than the gradients'."""
    collective = call.collective
    if collective is None or not collective.reduce_op or collective.elements < 2:
        return False
    dtype = getattr(torch, collective.dtype, None)
    return dtype is not None and torch.finfo(dtype).eps > torch.finfo(view.setting.dtype).eps


def fix(view: View) -> str:
    """Reduce in the type of the gradients."""
    dtype = str(view.setting.dtype).removeprefix("torch.")
    return f"reduce the gradients in {dtype}, their own type."


HYPOTHESIS = Hypothesis(
    name="low_precision_reduce",
    sentence="Gradients passed through a narrower type than their own, as when they are reduced in "
    "that type: the error is spread over all elements and has the size of that type's rounding.",
    look_at="a compression hook (fp16_compress_hook, bf16_compress_hook), mixed_precision's "
    "reduce_dtype, or a cast around all_reduce",
    predict=predict,
    indication=indication,
    tell_apart="Run the case in the narrower type: this difference then goes away.",
    headline="gradients are reduced in lower precision",
    lines=lines,
    fix=fix,
)
