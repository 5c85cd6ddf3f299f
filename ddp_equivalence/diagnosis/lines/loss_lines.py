"""The lines at which the loss of a step got its value, and those that multiplied it."""

from __future__ import annotations

from math import isclose

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.indications import LOSS_ROUNDING, common_loss_factor, losses_close
from ddp_equivalence.diagnosis.lines.number_text import scaling_text
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

SCALING = ("MulBackward", "DivBackward")
"""The operations that multiply a loss, as autograd names them, without the number at the end."""


def last_backward(view: View, rank: int | None = None) -> Call | None:
    """The last call of backward that began at a loss on this rank, or on the lowest one."""
    calls = view.observed.calls
    ranks = sorted(calls.by_rank) if rank is None else [rank]
    found = [
        call
        for call in (calls.of(ranks[0]) if ranks else ())
        if call.kind is Kind.BACKWARD and call.value is not None and _line(call)
    ]
    return found[-1] if found else None


def losses_before(view: View, backward: Call, rank: int | None = None) -> list[Call]:
    """The losses that were made between the backward before and this one, on the same rank."""
    calls = view.observed.calls
    ranks = sorted(calls.by_rank) if rank is None else [rank]
    of_rank = calls.of(ranks[0]) if ranks else ()
    return [
        call for call in of_rank if call.kind is Kind.LOSS and call.backwards == backward.backwards
    ]


def line_of_loss(
    view: View,
    note: str = "",
    is_fault: bool = False,
    missing: str = "",
    before_backward: bool = False,
) -> PointedLine | None:
    """The line at which the loss of the last backward got the value that backward began at.

    That is the line of backward itself if no line before it has left this value in a variable.
    The case's own loss function is never pointed at, because the big batch has its loss from it.
    ``before_backward``: only a line of the function that calls backward is wanted.
    """
    backward = last_backward(view)
    if backward is None:
        return None
    losses = losses_before(view, backward)
    equal = [number for number, one in enumerate(losses) if _equal(one.value, backward.value)]
    made = [losses[number] for number in equal if losses[number].what == losses[equal[-1]].what]
    for loss in made:
        if before_backward and _function(loss) != _function(backward):
            continue
        if _function(loss) != _of_the_case(view):
            return _pointed(loss, note, is_fault, missing)
    return _pointed(backward, note, is_fault, missing)


def line_of_unscaled_loss(view: View, note: str, is_fault: bool = False) -> PointedLine | None:
    """The line that made the loss of the last backward, before others multiplied or divided it."""
    backward = last_backward(view)
    if backward is None:
        return None
    made: Call | None = None
    for loss in losses_before(view, backward):
        is_new = made is None or not _equal(made.value, loss.value)
        if is_new and (made is None or not loss.what.startswith(SCALING)):
            made = loss
        if _equal(loss.value, backward.value):
            break
    return _pointed(made or backward, note, is_fault)


def line_that_scales_loss(view: View, factor: float) -> PointedLine | None:
    """The line that multiplies the loss by this number; None if none was seen."""
    backward = last_backward(view)
    if backward is None:
        return None
    losses = losses_before(view, backward)
    made = [loss for loss in losses if loss.what.startswith(SCALING)]
    for scaled in (*made, backward):
        for loss in losses[: losses.index(scaled)] if scaled is not backward else losses:
            if _is_multiple(scaled.value, loss.value, factor):
                return _pointed(scaled, scaling_text("the loss", factor), True)
    common = common_loss_factor(view)
    if common is not None and losses_close(common, factor) and not losses_close(factor, 1.0):
        return line_of_loss(
            view, f"here the loss is {text_of(factor, '.4g')} times that of its rows", True
        )
    return None


def _function(call: Call) -> tuple[str, str]:
    line = call.users_line or call.line
    return (line.file, line.function) if line is not None else ("", "")


def _of_the_case(view: View) -> tuple[str, str]:
    """The file and the name of the case's own loss function; "" if the case names a loss."""
    code = getattr(view.setting.case.loss, "__code__", None)
    return (code.co_filename, code.co_name) if code is not None else ("", "")


def _is_multiple(value: float | None, of: float | None, factor: float) -> bool:
    if value is None or not of:
        return False
    return isclose(value / of, factor, rel_tol=LOSS_ROUNDING)


def _equal(value: float | None, other: float | None) -> bool:
    return value is not None and other is not None and losses_close(value, other)


def _line(call: Call) -> bool:
    return (call.users_line or call.line) is not None


def _pointed(call: Call, note: str, is_fault: bool, missing: str = "") -> PointedLine | None:
    line = call.users_line or call.line
    return None if line is None else PointedLine(line, note, is_fault, missing)
