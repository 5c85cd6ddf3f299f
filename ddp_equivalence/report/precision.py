"""Lines about a step that float64 does not show as it is: with autocast, or float32 inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.report.line import Line, paragraph

if TYPE_CHECKING:
    import torch

    from ddp_equivalence.report.verdict import Verdict


def precision_lines(verdict: Verdict) -> list[Line]:
    """What was judged in which precision, if it was judged in two, and why."""
    text = " ".join(_sentences(verdict))
    return paragraph(text, "  ") if text else []


def _sentences(verdict: Verdict) -> Iterator[str]:
    other, in_float64 = verdict.other_precision, verdict.is_in_float64
    if other is not None and not in_float64:
        yield from _judged_in_own(verdict, other)
        return
    if verdict.float32_at:
        yield (
            "The difference has the size of float32's rounding, and the step computes in float32 "
            f"inside this check in float64: {verdict.float32_at}."
        )
        if other is None:
            yield (
                "The model is built in float64: give the step's constants, buffers and reductions "
                "the dtype of the model."
            )
    elif verdict.autocast is not None and in_float64 and verdict.outcome == "same":
        name = _name(verdict.autocast)
        yield f"The step enters autocast ({name}), which does nothing in float64."
        if other is None:
            yield "The model is built in float64, so the step was checked in no other precision."
    if other is not None:
        yield f"In the model's own precision the step was checked as well: {_outcome(other)}."


def _judged_in_own(verdict: Verdict, other: Verdict) -> Iterator[str]:
    if other.float32_at:
        yield (
            f"Judged in the model's own precision. In float64 it is off by {other.error or 0:.1e}, "
            f"the rounding of float32, because the step computes in float32: {other.float32_at}."
        )
    elif verdict.autocast is not None:
        yield (
            "Judged in the model's own precision. In float64, where autocast "
            f"({_name(verdict.autocast)}) does nothing, the outcome is {other.outcome}."
        )


def _outcome(verdict: Verdict) -> str:
    if verdict.error is None or verdict.limit is None:
        return verdict.outcome
    return f"{verdict.outcome}, error {verdict.error:.1e}  limit {verdict.limit:.1e}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
