"""The lines of a forward pass and a loss, and those that change buffers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import LOSS_ROUNDING, common_loss_factor, losses_close
from ddp_equivalence.diagnosis.lines.words import scaling_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine, StepCalls
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.observation import Forward

SCALING = ("MulBackward", "DivBackward")
"""The operations that multiply a loss, as autograd names them, without the number at the end."""


def last_backward(view: View) -> Call | None:
    """The last call of backward that began at a loss on the lowest rank."""
    found = [
        call
        for call in view.observed.calls.of_lowest_rank
        if call.kind is Kind.BACKWARD and call.value is not None and call.at is not None
    ]
    return found[-1] if found else None


def losses_before(view: View, backward: Call) -> list[Call]:
    """The losses that were made between the backward before and this one, on the same rank."""
    return [
        call
        for call in view.observed.calls.of_lowest_rank
        if call.kind is Kind.LOSS and call.backwards == backward.backwards
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


def line_that_multiplies_loss(view: View, factor: float) -> PointedLine | None:
    """The line that multiplies or divides one loss to another, so many times as large; None if none
    was seen, or if the number is 1.
    """
    backward = last_backward(view)
    if backward is None or losses_close(factor, 1.0):
        return None
    losses = losses_before(view, backward)
    made = [loss for loss in losses if loss.what.startswith(SCALING)]
    for scaled in (*made, backward):
        for loss in losses[: losses.index(scaled)] if scaled is not backward else losses:
            if _is_multiple(scaled.value, loss.value, factor):
                return _pointed(scaled, scaling_text("the loss", factor), True)
    return None


def line_that_scales_loss(view: View, factor: float) -> PointedLine | None:
    """The line that multiplies the loss by this number; None if none was seen."""
    found, common = line_that_multiplies_loss(view, factor), common_loss_factor(view)
    if found is not None or last_backward(view) is None:
        return found
    if common is not None and losses_close(common, factor) and not losses_close(factor, 1.0):
        return line_of_loss(
            view, f"here the loss is {text_of(factor, '.4g')} times that of its rows", True
        )
    return None


def _function(call: Call) -> tuple[str, str]:
    line = call.at
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


def _pointed(call: Call, note: str, is_fault: bool, missing: str = "") -> PointedLine | None:
    line = call.at
    return None if line is None else PointedLine(line, note, is_fault, missing)


BATCH_NORMS = ("BatchNorm", "batch_norm")
DROPOUTS = ("Dropout", "dropout", "MultiheadAttention", "RNN", "LSTM", "GRU")
STATISTICS = ("Var", "Std", "Cov", "Corrcoef", "Mm", "Mean")
COMPARISONS = ("Mm", "Bmm", "Baddbmm", "Cdist", "EuclideanDist", "CosineSimilarity", "LogSoftmax")

MOST_DRAWS = 2
"""So many lines that draw random numbers are shown."""

PROPERTY = "a property of the {}, no fault"


def module_lines(
    view: View, words: Sequence[str], note: str, is_property: bool = True
) -> Sequence[PointedLine]:
    """The line of the forward pass that first called a module whose class has one of the words.

    ``note``: what the module did.
    """

    def is_one(call: Call) -> bool:
        return any(word in call.what for word in words)

    pointed = []
    for place in view.observed.calls.places(Kind.MODULE, where=is_one)[:1]:
        name = f" {place.names[0]}" if place.names else ""
        text = f"{place.first.what}{name} {note}"
        if is_property:
            text += f": {PROPERTY.format('model')}"
        pointed.append(place.pointed(text, is_fault=True))
    return pointed


def draw_lines(view: View, note: str) -> Sequence[PointedLine]:
    """The first lines under which a rank drew random numbers, other than to shuffle, if its draws
    were recorded. ``note``: which numbers they draw.
    """
    shuffling = (Kind.SHUFFLE, Kind.SAMPLER, Kind.LOADER, Kind.NEW_GROUP)
    shuffles = {place.line for place in view.observed.calls.places(*shuffling)}
    draws = [one for seen in view.observed.by_rank.values() for one in seen.draws or ()]
    lines = dict.fromkeys(one.line for one in draws if one.line not in {None, *shuffles})
    return [PointedLine(line, note, is_fault=True) for line in lines if line][:MOST_DRAWS]


def loss_lines(view: View, functions: Sequence[str], note: str) -> Sequence[PointedLine]:
    """The line of the loss that used the first of these functions of autograd that any line used.

    Without one, the line that computed what backward began at. ``note``: what the line takes.
    """
    places = view.observed.calls.places(Kind.LOSS_FUNCTIONS)
    text = f"{note}: {PROPERTY.format('loss')}"
    for function in functions:
        for place in places:
            used = {name.rstrip("0123456789") for name in place.first.names}
            if function in used:
                return [place.pointed(text, is_fault=True)]
    return [place.pointed(text, is_fault=True) for place in places[:1]]


def buffer_changes(view: View) -> list[CallSite]:
    """The lines that changed buffers up to this step, in this step before the first backward.

    DistributedDataParallel writes to them too when it is made and called, so those lines come only
    where there is no other.
    """
    step = view.setting.step
    calls = StepCalls(
        {
            rank: tuple(call for call in seen.calls if (call.step, call.backwards) <= (step, 0))
            for rank, seen in view.observed.by_rank.items()
        }
    )
    places = calls.places(Kind.BUFFERS)
    for kinds in ((Kind.WRAP, Kind.FORWARD), (Kind.WRAP,)):
        of_ddp = {place.line for place in calls.places(*kinds)}
        others = [place for place in places if place.line not in of_ddp]
        if others:
            return others
    return places


def buffers_apart(view: View) -> tuple[str, ...]:
    """The buffers that differ between ranks before a forward pass of this step."""
    by_rank = [forwards_of(view, rank) for rank in view.observed.by_rank]
    if not by_rank:
        return ()
    apart: dict[str, None] = {}
    for at_once in zip(*by_rank, strict=False):
        held: dict[str, set[bytes]] = {}
        for forward in at_once:
            for name, value in forward.buffers.items():
                held.setdefault(name, set()).add(value.contiguous().numpy().tobytes())
        apart |= {name: None for name, values in held.items() if len(values) > 1}
    return tuple(apart)


def forwards_of(view: View, rank: int) -> list[Forward]:
    """The forward passes of one rank in this step."""
    forwards = view.observed.by_rank[rank].forwards
    return [one for one in forwards if one.step == view.setting.step]
