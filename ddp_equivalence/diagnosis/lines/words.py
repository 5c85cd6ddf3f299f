"""How reports write lines, factors and counts."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import CodeLine


def in_order(view: View, *lines: PointedLine | None) -> Sequence[PointedLine]:
    """Those of the lines that are known, each once, in the order in which they first ran.

    Of two entries for one line, the one that is the fault counts.
    """
    first: dict[CodeLine, int] = {}
    for number, call in enumerate(view.observed.calls.of_lowest_rank):
        for line in (call.chosen_at, call.users_line, call.line):
            if line is not None:
                first.setdefault(line, number)
    chosen: dict[CodeLine, PointedLine] = {}
    for one in lines:
        if one is not None and (one.line not in chosen or one.is_fault):
            chosen[one.line] = one
    return sorted(chosen.values(), key=lambda one: first.get(one.line, len(first)))


def scaling_text(what: str, factor: float) -> str:
    """What multiplying by this number does: ``divides the loss by 4``."""
    if 0 < abs(factor) < 1:
        return f"divides {what} by {text_of(1 / factor, '.6g')}"
    return f"multiplies {what} by {text_of(factor, '.6g')}"


MOST_NAMES = 2


def names_text(names: Sequence[str]) -> str:
    """Names as text: ``0.weight, 0.bias and 4 more``."""
    shown = list(names[:MOST_NAMES]) if len(names) != MOST_NAMES + 1 else list(names)
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def counted(count: int, noun: str) -> str:
    """A number with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_of(
    places: Sequence[CallSite], note: str = "", is_fault: bool = True, missing: str = ""
) -> list[PointedLine]:
    """The first of these places with a note; [] if there is none."""
    return [one.pointed(note, is_fault, missing) for one in places[:1]]


def last_of(
    places: Sequence[CallSite], note: str = "", is_fault: bool = True, missing: str = ""
) -> list[PointedLine]:
    """The last of these places with a note; [] if there is none."""
    return [one.pointed(note, is_fault, missing) for one in places[-1:]]
