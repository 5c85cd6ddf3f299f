"""Where a difference without a name is: the answer, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.setting import PointedLine

WhichPart = Literal["own gradient", "reduction", "big batch", "not seen"]
WhatWasSeen = Literal[
    "gradients missing", "no weighted sum", "right ones changed", "loss of rows", "something else"
]

MOST_LINES = 3
MOST_RANKS = 6
MOST_RANGES = 3

LOSS_OF_ROWS = "the loss of the rows"
LOOK_FIRST = "> marks what to look at first."
RIGHT_ALONE = "On one rank with the whole batch the step is right."
WRONG_ALONE = "On one rank with the whole batch the step is wrong, too."
WRONG_ALONE_BRIEFLY = "On one rank the step is wrong, too."


@dataclass(frozen=True)
class Whereabouts:
    """``kind``: "own gradient" if what a rank computed before any reduction is not what its rows
    give; "reduction" if that is right, and what the ranks hold afterwards is not made of it as it
    should be; "big batch" if both are right and the big batch divides otherwise; "not seen" if
    none of these was shown. ``headline``: the same in at most ten words, in lower case.
    ``lines``: in the order in which they ran. ``parameters``, ``ranks``: that are concerned.
    ``fix``: "" if nothing certain can be said. ``is_right_alone``: the same step is right on one
    rank with the whole batch; None if it did not run there, or if the sentence tells it already.
    ``rounds_in``: it is right there up to the rounding of this dtype; "" if it is nearer.
    ``marks``: what the marked lines are, as a sentence about ">"; "" if their notes say enough.
    ``shows_later``: the marked line is only one in which the fault of another shows, such as that
    of the loss. ``explains_all``: a run on one rank can say no more about it. ``what``: what the
    headline says of the gradients, as far as anything depends on it: some of a rank or a parameter
    are missing, a line leaves no weighted sum of them, right ones are changed afterwards, or the
    loss of a rank is not that of its rows, which it need not be.
    """

    kind: WhichPart
    headline: str
    sentence: str
    lines: tuple[PointedLine, ...] = ()
    parameters: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    fix: str = ""
    is_right_alone: bool | None = None
    rounds_in: str = ""
    marks: str = ""
    shows_later: bool = False
    explains_all: bool = False
    what: WhatWasSeen = "something else"

    @property
    def beside_one_rank(self) -> str:
        """The sentence on what the step does on one rank, a short one beside that on the marks."""
        if self.is_right_alone is None:
            return ""
        if self.is_right_alone:
            rounded = f", up to rounding in {self.rounds_in}" if self.rounds_in else ""
            return f"{RIGHT_ALONE[:-1]}{rounded}."
        return WRONG_ALONE_BRIEFLY if self.marks else WRONG_ALONE


def not_seen(why: str) -> Whereabouts:
    """Nothing was shown. ``why``: as a clause."""
    return Whereabouts("not seen", "the second run did not show where", f"Not seen where: {why}.")


def ranked(ranks: Sequence[int], world_size: int) -> str:
    """Ranks as text: ``rank 2``, ``ranks 0 and 3``, ``every rank``."""
    if len(ranks) == world_size:
        return "every rank" if world_size > 1 else "the rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_RANKS:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:MOST_RANKS]))}, ...)"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def positions_text(positions: Sequence[int]) -> str:
    """Positions as text: ``0 to 3 and 12 to 15``."""
    ranges: list[list[int]] = []
    for one in positions:
        if ranges and ranges[-1][1] == one - 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    shown = [f"{a} to {b}" if b > a else f"{a}" for a, b in ranges]
    if len(shown) > MOST_RANGES:
        return ", ".join([*shown[:MOST_RANGES], "..."])
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def of_all(names: Sequence[str], every: Sequence[str]) -> str:
    """The gradients of parameters as text: ``every gradient``, ``the gradients of a, b``."""
    if len(names) == len(every):
        return "every gradient"
    return f"the gradient{'s' if len(names) > 1 else ''} of {names_text(names)}"


def distinct(lines: Sequence[PointedLine | None]) -> tuple[PointedLine, ...]:
    """Each line once, with all of its notes, and not more lines than fit on a screen."""
    found: dict[object, PointedLine] = {}
    for one in lines:
        if one is None:
            continue
        key = one.line.file, one.line.number
        known = found.get(key, one)
        if known is not one:
            known = PointedLine(
                known.line,
                "; ".join(dict.fromkeys(filter(None, (known.note, one.note)))),
                known.is_fault or one.is_fault,
                known.missing or one.missing,
                known.begins_backward and one.begins_backward,
            )
        found[key] = known
    return tuple(found.values())[:MOST_LINES]


def first_of_each_line(lines: Sequence[PointedLine | None]) -> tuple[PointedLine, ...]:
    """Each line once, with its first note, and not more lines than fit on a screen."""
    first: dict[tuple[str, int], PointedLine] = {}
    for one in filter(None, lines):
        first.setdefault((one.line.file, one.line.number), one)
    return tuple(first.values())[:MOST_LINES]
