"""Lines about a step that float64 does not show as it is: with autocast, or float32 inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, paragraph

if TYPE_CHECKING:
    import torch

    from ddp_equivalence.report.verdict import Verdict


def precision_lines(verdict: Verdict) -> list[Line]:
    """What was judged in which precision, if it was judged in two, and why."""
    text = " ".join(_sentences(verdict))
    return paragraph(text, "  ") if text else []


def _sentences(verdict: Verdict) -> Iterator[str]:
    other = verdict.other_precision
    if verdict.why_not_float64:
        yield (
            f"The loss cannot be computed in float64 ({verdict.why_not_float64}), so the big batch "
            f"was computed in {_precision(verdict)} as well."
        )
    elif verdict.is_in_float64:
        yield from _in_float64(verdict, other)
    elif other is not None:
        yield from _in_lower_precision(verdict, other)


def _in_float64(verdict: Verdict, other: Verdict | None) -> Iterator[str]:
    if verdict.float32_at:
        yield (
            "The difference has the size of float32's rounding, and the step computes in float32 "
            f"inside this check in float64: {verdict.float32_at}."
        )
        if other is None:
            yield (
                "The model is built in float64: give the step's constants, buffers and reductions "
                "the dtype of the model, or check it in float32 with Case(dtype=torch.float32)."
            )
    elif verdict.autocast is not None and verdict.outcome == "same":
        name = _name(verdict.autocast)
        yield f"The step enters autocast ({name}), which does nothing in float64."
        if other is None:
            yield "The model is built in float64, so the step was checked in no other precision."
    if other is not None:
        autocast = "" if verdict.autocast is None else f" with autocast ({_name(verdict.autocast)})"
        yield f"In {_precision(other)}{autocast} it was checked as well: {_outcome(other)}."


def _in_lower_precision(verdict: Verdict, other: Verdict) -> Iterator[str]:
    """``other``: the verdict in float64."""
    judged = f"Judged in {_precision(verdict)}."
    if other.float32_at:
        yield (
            f"{judged} In float64 it is off by {text_of(other.error or 0, '.1e')}, the rounding of "
            f"float32, because the step computes in float32: {other.float32_at}."
        )
    elif verdict.autocast is not None:
        off = ""
        if other.outcome == "different":  # by more, the verdict would be the one in float64
            off = f" by {text_of(other.error or 0, '.1e')}, which is the size of float32's rounding"
        yield (
            f"{judged} In float64, where autocast ({_name(verdict.autocast)}) does nothing, the "
            f"outcome is {other.outcome}{off}."
        )


def _precision(verdict: Verdict) -> str:
    """The least precise dtype of the model."""
    dtype = None if verdict.analysis is None else verdict.analysis.lowest_dtype
    return "the model's own precision" if dtype is None else _name(dtype)


def _outcome(verdict: Verdict) -> str:
    if verdict.error is None or verdict.limit is None:
        return verdict.outcome
    error, limit = text_of(verdict.error, ".1e"), text_of(verdict.limit, ".1e")
    return f"{verdict.outcome}, error {error}  limit {limit}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
