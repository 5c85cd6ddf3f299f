"""The lines at which gradients are reduced, and those that multiply them by a number."""

from __future__ import annotations

from collections.abc import Callable

from ddp_equivalence.diagnosis.lines.loss_lines import line_that_scales_loss
from ddp_equivalence.diagnosis.lines.number_text import scaling_text
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.diagnosis.step_calls import Place
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

SAME = 1e-3
"""Gradients have a common factor if this much of them, relative to their norm, has not."""


def by_hand(view: View) -> list[Place]:
    """The lines of the user's own code that reduce gradients outside a backward pass."""
    return [place for place in view.observed.calls.reductions if not place.first.in_backward]


def in_hook(view: View) -> list[Place]:
    """The lines that reduce gradients inside a communication hook, or that register the hook.

    A hook of torch itself has no line of the user's, so the line that registers it stands for it.
    """
    calls = view.observed.calls
    backwards = {place.line for place in calls.backwards}
    inside = [
        place
        for place in calls.reductions
        if place.first.in_backward and place.line not in backwards
    ]
    return inside or calls.places(Kind.HOOK)


def hook_was_registered(view: View) -> bool:
    """True if DDP was given a communication hook. Tensors have hooks of their own."""
    return bool(view.observed.calls.places(Kind.HOOK))


def ddp_reduces(view: View) -> bool:
    """True if DDP was to reduce gradients in the last backward pass, without a hook."""
    synchronises = any(wrapper.synchronised[-1:] == (True,) for wrapper in view.observed.wrappers)
    return synchronises and not view.observed.calls.places(Kind.HOOK)


def is_unseen(view: View) -> bool:
    """True if it was not seen what reduces the gradients, such as FSDP or this package."""
    return not (by_hand(view) or in_hook(view) or ddp_reduces(view))


def line_of_reduction(
    view: View, note: Callable[[str], str] = str, is_fault: bool = False, missing: str = ""
) -> PointedLine | None:
    """The last line at which gradients are reduced; None if none was seen.

    ``note`` gets what was seen to happen there, and returns what the report says of it.
    """
    for place in reversed(by_hand(view)):
        seen = f"{len(place.calls)} {_operation(place)}, over {_ranks(place)} ranks"
        return place.pointed(note(seen), is_fault, missing)
    for place in reversed(in_hook(view)):
        seen = hook_text(place)
        if place.kind is Kind.COLLECTIVE:
            inside = "in the communication hook" if hook_was_registered(view) else "during backward"
            seen = f"{_operation(place)} over {_ranks(place)} ranks, {inside}"
        return place.pointed(note(seen), is_fault, missing)
    if ddp_reduces(view):
        for place in reversed(view.observed.calls.backwards):
            seen = f"DDP averages over {_ranks_of_ddp(view)} ranks here"
            return place.pointed(note(seen), is_fault, missing)
    return None


def line_that_scales_gradients(view: View, factor: float) -> PointedLine | None:
    """The last line that multiplies gradients by this number; None if none was seen."""
    places = view.observed.calls.multiplied_by(factor)
    if not places:
        return None
    what = "the gradient" if len(places[-1].names) == 1 else f"{len(places[-1].names)} gradients"
    return places[-1].pointed(scaling_text(what, factor), True)


def line_that_scales(view: View, factor: float) -> PointedLine | None:
    """The line that multiplies gradients or the loss by this number; None if none was seen."""
    return line_that_scales_gradients(view, factor) or line_that_scales_loss(view, factor)


def averages(view: View) -> bool:
    """True if the reduction itself divides by the number of ranks: DDP without a hook, or AVG."""
    if by_hand(view):
        return _operation(by_hand(view)[-1]).endswith("AVG")
    return ddp_reduces(view)


def common_factor(view: View) -> float | None:
    """The number that all gradients on all ranks are multiplied by; None if it is not the same."""
    factor = view.measured.factor
    if not factor:
        return None
    rest = (view.measured.by_rank - factor * view.expected_by_rank).norm()
    is_common = float(rest) <= SAME * float(view.measured.by_rank.norm())
    return factor if is_common else None


def _ranks_of_ddp(view: View) -> int:
    """The number of ranks that DDP averages over; fewer than all if it was given a group."""
    logged = [wrapper.logged.get("world_size") for wrapper in view.observed.wrappers]
    return min([size for size in logged if isinstance(size, int)], default=view.world_size)


def hook_text(place: Place) -> str:
    """What a line does that registers a communication hook."""
    return f"gives DDP a communication hook, {place.first.what}"


def _operation(place: Place) -> str:
    collective = place.first.collective
    return "" if collective is None else f"{collective.op} {collective.reduce_op}".strip()


def _ranks(place: Place) -> int:
    return max((len(group) for group in place.groups), default=0)
