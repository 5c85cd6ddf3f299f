"""How often the examples of each rank count in what every rank holds: a table for the screen, and
all shares for the whole report. 1.00 is as often as in the big batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.text import (
    Line,
    cut,
    labelled,
    listed,
    plural,
    range_of_ranks,
    ranks_by,
    shortened,
)

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.shares import ShareRow, Shares
    from ddp_equivalence.report.blocks import Shape
    from ddp_equivalence.report.verdict import Verdict

ROUNDING = 1e-6
"""An unexplained part below this is rounding."""

OFF = 0.005
"""A share that is off by more than this is not printed as it should be."""

LARGE = 1e6
LEAST_SHARE = 1e-5

Cells = tuple[str, ...]


def share_text(share: float | None) -> str:
    """The share with two digits, and one that is very large with three in all."""
    if share is None:
        return "-"
    text = text_of(share, ".2f" if abs(share) < LARGE else ".3g")
    return "0.00" if text == "-0.00" else text


def _small_text(share: float | None, least: float) -> str:
    """The share with two digits; one that would be 0.00, and is not zero, with two that count."""
    text = share_text(share)
    if share is not None and text == "0.00" and abs(share) > least:
        return text_of(share, ".2g")
    return text


def _row_texts(row: Sequence[float | None], shares: Shares) -> Cells:
    """The shares of a row of the table. If all of them would be 0.00, the digits that count."""
    texts = tuple(map(share_text, row))
    if set(texts) <= {"0.00", "-"}:
        rounding = shares.condition * max(shares.unexplained.values())  # of what the rank holds
        largest = max((abs(share) for share in row if share is not None), default=0.0)
        return tuple(_small_text(share, largest * max(rounding, ROUNDING)) for share in row)
    return texts


def holders(ranks: Sequence[int], count: int, names: Callable[[Sequence[int]], str]) -> str:
    """``every rank holds``, or these ranks and their verb. ``count``: of all ranks."""
    if len(ranks) == count > 1:
        return "every rank holds"
    return f"{names(ranks)} {plural(len(ranks), 'holds', 'hold')}"


# Whether shares say anything about what the ranks hold.

WORST_FIT = 0.01
"""If no mixture of the examples explains more than this part, their shares say nothing."""

MOST_WEIGHTS = 6


def can_be_shown(shares: Shares) -> bool:
    """True if what the ranks hold is a mixture of examples, and no other mixture fits as well."""
    unexplained = max(shares.unexplained.values())
    known = [share for row in _finest_rows(shares) for share in row if share is not None]
    is_noise = bool(known) and min(known) < -OFF and unexplained > ROUNDING
    if unexplained > WORST_FIT or is_noise or has_too_few_elements(shares):
        return False
    return not any(map(_are_no_counts, _finest_rows(shares)))


def _are_no_counts(row: ShareRow) -> bool:
    """True for many weights of both signs. How often something counts has no sign: the loss then
    compares examples with each other, and its gradient happens to be a mixture of theirs.
    """
    known = [share for share in row if share is not None]
    has_both_signs = bool(known) and min(known) < -OFF and max(known) > OFF
    return has_both_signs and len(set(map(share_text, known))) > MOST_WEIGHTS


def has_too_few_elements(shares: Shares) -> bool:
    """True if some mixture would fit whatever the ranks hold."""
    return any(len(row) >= shares.elements for row in _finest_rows(shares))


def all_are_right(shares: Shares) -> bool:
    """True if every example counts as often as it should, to two digits."""
    rows = _finest_rows(shares)
    return all(share_text(share) in ("1.00", "-") for row in rows for share in row)


def _finest_rows(shares: Shares) -> list[ShareRow]:
    """The numbers that were fitted, or the means of them that are known, by rank."""
    if shares.by_example is not None:
        return list(shares.by_example.values())
    if shares.by_micro_batch is not None:
        return [sum(rows, ()) for rows in shares.by_micro_batch.values()]
    return list(shares.by_rank.values())


# The table of the screen.

MOST_COLUMNS = 6
"""With more ranks, neighbours whose examples count alike share a column."""

MOST_NAMES = 3
LONGEST_NAME = 30
MOST_GROUPS = 3
SHOULD_COUNT = "Every example should count 1.00 on every rank."
MOST_OF_GROUP = 8
"""So many examples with a share of their own are listed."""


@dataclass(frozen=True)
class ShareTable:
    """The shares by rank, with equal rows together. ``words``: the same without a table."""

    shares: Shares
    world_size: int
    words: Sequence[Line]

    @cached_property
    def _columns(self) -> list[list[int]]:
        """The ranks whose examples share a column."""
        if self.world_size <= MOST_COLUMNS:
            return [[rank] for rank in range(self.world_size)]
        columns: list[list[int]] = []
        last = None
        for rank in range(self.world_size):
            held = [share_text(row[rank]) for row in self.shares.by_rank.values()]
            if held == last:
                columns[-1].append(rank)
            else:
                columns.append([rank])
            last = held
        return columns[:MOST_COLUMNS]

    @cached_property
    def _rows(self) -> list[tuple[Cells, list[int]]]:
        """Different rows, and the ranks that hold each."""
        cells = (
            (rank, _row_texts([row[ranks[0]] for ranks in self._columns], self.shares))
            for rank, row in self.shares.by_rank.items()
        )
        return list(ranks_by(cells).items())

    @cached_property
    def _all_are_right(self) -> bool:
        return {cell for cells, _ in self._rows for cell in cells} <= {"1.00", "-"}

    @property
    def _details(self) -> list[str]:
        return [text for text in _details(self.shares) if text]

    def lines(self, shape: Shape) -> Sequence[Line]:
        """The table with as many rows as there may be; in words if there may be none."""
        if not shape.rows:
            return self.words
        # If the rows are too many, and every rank holds its own examples only, it says that.
        apart = [] if len(self._rows) <= shape.rows else _own_and_others(self.shares)
        details = self._details
        exceptions = f"Every rank holds other shares: {details[-1]}." if details else ""
        fits = ": example" in exceptions and len(exceptions) + 2 <= shape.width
        if len(self._rows) == 1 and fits:
            apart, details = [SHOULD_COUNT, exceptions], details[:-1]
        if not apart and not (details and shape.details) and self._all_are_right:
            return self.words  # examples of one rank make up for each other
        texts = apart or list(self._texts(shape.rows))
        scope = [only_in(self.shares.only)] if self.shares.only else []
        shown = (*texts, *scope, *(details if shape.details else ()))
        return [Line(cut(f"  {text}", shape.width)) for text in shown]

    def _texts(self, most: int) -> Iterator[str]:
        columns, every_row = self._columns, list(self.shares.by_rank.values())
        known = (any(row[rank] is not None for row in every_row for rank in of) for of in columns)
        shown = self._rows if len(self._rows) <= most else self._rows[: most - 1]
        names = [holders(ranks, len(every_row), range_of_ranks) for _, ranks in shown]
        labels = ["examples of", "should count", *names]
        expected = ["1.00" if one else "-" for one in known]
        table = [list(map(range_of_ranks, columns)), expected, *(list(cells) for cells, _ in shown)]
        widths = [max(6, *map(len, column)) + 2 for column in zip(*table, strict=True)]
        has_more = sum(map(len, columns)) < self.world_size
        for number, (label, cells) in enumerate(zip(labels, table, strict=True)):
            numbers = "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
            dots = "  ..." if number == 0 and has_more else ""
            yield f"{label:<{max(map(len, labels))}}{numbers}{dots}"
        others = [rank for _, ranks in self._rows[len(shown) :] for rank in ranks]
        if others:
            verb = plural(len(others), "holds", "hold")
            yield f"{range_of_ranks(others)} {verb} other shares"


def _own_and_others(shares: Shares) -> list[str]:
    """Where every rank holds one share of its own examples and another of all others: both."""
    own: set[str] = set()
    others: set[str] = set()
    for rank, row in shares.by_rank.items():
        own.add(share_text(row[rank]))
        others |= {share_text(share) for source, share in enumerate(row) if source != rank}
    if len(own) != 1 or len(others) != 1:
        return []
    return [
        SHOULD_COUNT,
        f"Each rank holds its own examples {own.pop()} times, and those of others {others.pop()} "
        "times.",
    ]


def only_in(names: Sequence[str]) -> str:
    """Says that these parameters differ, and no others."""
    shown = listed([shortened(name, LONGEST_NAME) for name in names], MOST_NAMES)
    return f"(in {shown}; all other parameters are right)"


def _details(shares: Shares) -> Iterator[str]:
    """Shares of micro-batches and examples that are the same on all ranks but not within one."""
    least = max(LEAST_SHARE, shares.condition * max(shares.unexplained.values()))

    def only_row(rows: Sequence[ShareRow]) -> Cells:
        held = {tuple(_small_text(share, least) for share in row) for row in rows}
        return held.pop() if len(held) == 1 else ()

    numbers = only_row([row for rows in (shares.by_micro_batch or {}).values() for row in rows])
    if len(set(numbers)) > 1:
        order = f"each rank's {len(numbers)} micro-batches, in their order"
        yield f"{order}: {'  '.join(numbers)}"
    row = only_row(list((shares.by_example or {}).values()))
    yield _exceptions(row, {share_text(one) for mean in shares.by_rank.values() for one in mean})


def _exceptions(row: Cells, means: set[str]) -> str:
    """The examples that do not count once, if they are few, and not all those of whole ranks."""
    wrong = ranks_by((n, share) for n, share in enumerate(row) if share not in ("1.00", "-"))
    count = sum(map(len, wrong.values()))
    if not wrong or 2 * count > len(row) or wrong.keys() <= means:
        return ""
    if len(wrong) > MOST_GROUPS or max(map(len, wrong.values())) > MOST_OF_GROUP:
        return ""
    texts = [f"{', '.join(map(str, indices))}: {share}" for share, indices in wrong.items()]
    return f"{plural(count, 'example')} {'; '.join(texts)}; all others 1.00"


# How the shares were found, for the whole report.


def shares_lines(verdict: Verdict) -> list[Line]:
    """The conditions of the fit, or why there are no shares."""
    shares = verdict.shares
    if shares is None:
        why = verdict.why_no_shares
        return labelled("No shares of examples: ", why.reason if why else "")
    unexplained = max(shares.unexplained.values())
    rest = "nothing" if unexplained < ROUNDING else f"{text_of(unexplained, '.2g')} of the norm"
    text = (
        f"a fit of the {shares.pieces}' gradients on {shares.elements} elements; "
        f"condition number {text_of(shares.condition, '.3g')}; unexplained: {rest}"
    )
    if unexplained >= ROUNDING and not verdict.causes and not verdict.again.float32_at:
        text += (
            ", which may come from statistics that examples share, from other weights or random "
            "numbers, or from damage on the way"
        )
    if shares.why_not_examples:
        text += f" (not fitted by example, because {shares.why_not_examples})"
    return labelled("Shares: ", text)
