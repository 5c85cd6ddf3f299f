"""A shorter accumulation window was divided by the number of micro-batches of a full one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    WrongFactor,
    common_loss_factor,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

WHOLE = 1e-3
"""A number that differs from a whole one by less is taken for it."""

MOST_MICRO_BATCHES = 4096


def predict(view: View) -> Sequence[Prediction]:
    """The ranks' windows, each divided by the same number, where their lengths differ."""
    lengths, full = _lengths(view), _full_window(view)
    contributions = view.parts.contributions()
    if full is None or len(set(lengths)) < 2 or contributions is None:
        return ()
    weights = torch.tensor(lengths, dtype=contributions.dtype)[:, None] / full
    shown = ", ".join(map(str, lengths[:6]))
    detail = f"windows of {shown} micro-batches, each divided by {full}"
    return (Prediction(view.on_every_rank((weights * contributions).mean(0)), detail),)


def factors(view: View) -> Sequence[WrongFactor]:
    """The length of the window, divided by that of a full one."""
    lengths, full = _lengths(view), _full_window(view)
    if full is None or len(set(lengths)) > 1:
        return ()
    return (WrongFactor(lengths[0] / full, f"{lengths[0]} micro-batches, divided by {full}"),)


def _lengths(view: View) -> tuple[int, ...]:
    """How many micro-batches each rank has gone through; () if that is not known."""
    read = view.observed.examples_read
    return () if read is None else tuple(map(len, read))


def _full_window(view: View) -> int | None:
    """The number that every micro-batch was divided by, if no window has as many micro-batches.

    A single micro-batch tells nothing: its loss may be divided by anything.
    """
    lengths = _lengths(view)
    if not lengths or max(lengths) < 2:
        return None
    longer = [one for one in _divisors_seen(view) if max(lengths) < one < MOST_MICRO_BATCHES]
    if not longer:
        return None
    held = view.measured.factor or 1.0
    return min(longer, key=lambda full: abs(sum(lengths) / len(lengths) / full - held))


def _divisors_seen(view: View) -> Iterator[int]:
    """The whole numbers that losses before backward, or gradients after it, were divided by."""
    ratio = common_loss_factor(view)
    multiplied = [] if ratio is None or ratio == 1 else [ratio]
    after = {
        call.change.factor
        for call in view.observed.calls.of(0)
        if call.change is not None and call.change.factor and not call.in_backward
    }
    for factor in (*multiplied, *after):
        for divisor in (1 / factor, 1 / (factor * view.world_size)):
            if divisor > 1 and abs(divisor - round(divisor)) < WHOLE * divisor:
                yield round(divisor)


def indication(view: View) -> Indication | None:
    """Compares the number of micro-batches with what their losses are divided by."""
    lengths, full = _lengths(view), _full_window(view)
    if full is None:
        return None
    numbers_of_ranks = {view.world_size, view.setting.layout.nodes, view.world_size**2}
    if full / max(lengths) in numbers_of_ranks:
        return None  # the divisor may be the number of ranks instead
    shown = "/".join(map(str, sorted(set(lengths))))
    return Indication(True, f"{shown} micro-batches were read, and divided by {full}")


def lines(view: View) -> Sequence[PointedLine]:
    """Where each micro-batch is divided."""
    calls, full = view.observed.calls, _full_window(view)
    if full is None:
        return ()
    ratio = common_loss_factor(view)
    if ratio is not None and ratio < 1 - WHOLE:
        count = max(_lengths(view))
        note = f"ran {count} times; each loss is divided by {full}"
        return [place.pointed(note, is_fault=True) for place in calls.places(Kind.BACKWARD)[-1:]]
    at_once = full * view.world_size
    note = f"divides by {full}, the full window"
    places = calls.multiplied_by(1 / full)
    if not places:
        note = f"divides by {at_once}: {full} micro-batches on each of {view.world_size} ranks"
        places = calls.multiplied_by(1 / at_once)
    return [place.pointed(note, is_fault=True) for place in places[-1:]]


def fix(view: View) -> str:
    """Divide by the length of this window."""
    lengths, full = set(_lengths(view)), _full_window(view)
    count = f" ({lengths.pop()})" if len(lengths) == 1 else ""
    return f"divide by the number of micro-batches in this window{count}, not by {full}."


HYPOTHESIS = Hypothesis(
    name="last_window_divided_by_full",
    sentence="An accumulation window with fewer micro-batches, as at the end of an epoch, was "
    "divided by the number of a full window.",
    look_at="the divisor of the loss in the last window of an epoch: the number of micro-batches "
    "that it has, not accumulation_steps",
    predict=predict,
    factors=factors,
    indication=indication,
    tell_apart="Use a multiple of the full window as the number of micro-batches.",
    headline="a short window divided like full ones",
    lines=lines,
    fix=fix,
)
