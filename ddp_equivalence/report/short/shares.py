"""Expected against held, as a table: how often the examples of each rank count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line
from ddp_equivalence.report.short.text import cut, range_of_ranks, shortened

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.shares import Shares
    from ddp_equivalence.report.verdict import Verdict

MOST_COLUMNS = 6
"""With more ranks, neighbours whose examples count alike share a column."""

MOST_ROWS = 6

WORST_FIT = 0.01
"""If no mixture of the examples explains more than this part, their shares say nothing."""

ROUNDING = 1e-6
LEAST_SHARE = 1e-5
MOST_NAMES = 3
LONGEST_NAME = 30

OFF_ZERO = 0.005
MOST_WEIGHTS = 6

MOST_GROUPS = 3
MOST_EXAMPLES = 8
"""So many examples with a share of their own are listed."""

Cells = tuple[str, ...]


def can_be_shown(shares: Shares) -> bool:
    """True if what the ranks hold is a mixture of examples, and no other mixture fits as well."""
    unexplained = max(shares.unexplained.values())
    known = [share for row in _finest_rows(shares) for share in row if share is not None]
    is_noise = bool(known) and min(known) < -0.005 and unexplained > ROUNDING
    if unexplained > WORST_FIT or is_noise or has_too_few_elements(shares):
        return False
    return not any(map(_are_no_counts, _finest_rows(shares)))


def _are_no_counts(row: Sequence[float | None]) -> bool:
    """True for many weights of both signs. How often something counts has no sign: the loss then
    compares examples with each other, and its gradient happens to be a mixture of theirs.
    """
    known = [share for share in row if share is not None]
    has_both_signs = bool(known) and min(known) < -OFF_ZERO and max(known) > OFF_ZERO
    return has_both_signs and len(set(map(share_text, known))) > MOST_WEIGHTS


def has_too_few_elements(shares: Shares) -> bool:
    """True if some mixture would fit whatever the ranks hold."""
    return any(len(row) >= shares.elements for row in _finest_rows(shares))


def _finest_rows(shares: Shares) -> Iterator[tuple[float | None, ...]]:
    """The numbers that were fitted, or the means of them that are known, by rank."""
    if shares.by_example is not None:
        yield from shares.by_example.values()
    elif shares.by_micro_batch is not None:
        yield from (
            tuple(share for row in rows for share in row) for rows in shares.by_micro_batch.values()
        )
    else:
        yield from shares.by_rank.values()


def table_lines(verdict: Verdict, shares: Shares, most_rows: int, width: int) -> list[Line]:
    """The table, with equal rows together."""
    columns = _columns(verdict, shares)
    names = [range_of_ranks(ranks) for ranks in columns]
    rows: dict[Cells, list[int]] = {}
    for rank, row in shares.by_rank.items():
        texts = share_texts([row[ranks[0]] for ranks in columns], shares)
        rows.setdefault(texts, []).append(rank)
    held = [(_holders(ranks, shares), cells) for cells, ranks in rows.items()]
    if len(held) > most_rows:
        own = _own_and_others(shares)
        if own:
            return [Line(cut(f"  {text}", width)) for text in own]
        held = held[: most_rows - 1]
    expected = ["-" if _is_empty(shares, ranks) else "1.00" for ranks in columns]
    labels = ["examples of", "should count", *(name for name, _ in held)]
    label = max(map(len, labels))
    table = [names, expected, *(cells for _, cells in held)]
    widths = [max(6, *map(len, column)) + 2 for column in zip(*table, strict=True)]
    lines = []
    for name, cells in zip(labels, table, strict=True):
        numbers = "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        lines.append(Line(cut(f"  {name:<{label}}{numbers}", width)))
    if sum(map(len, columns)) < verdict.case.ranks.world_size:
        lines[0] = Line(cut(f"{lines[0].text}  ...", width))
    if len(held) < len(rows):
        others = sorted(rank for ranks in list(rows.values())[len(held) :] for rank in ranks)
        verb = "holds" if len(others) == 1 else "hold"
        lines.append(Line(cut(f"  {range_of_ranks(others)} {verb} other shares", width)))
    return lines


def all_are_right(shares: Shares) -> bool:
    """True if every example counts as often as it should, to two digits."""
    rows = _finest_rows(shares)
    return all(share_text(share) in ("1.00", "-") for row in rows for share in row)


def _own_and_others(shares: Shares) -> list[str]:
    """Where every rank holds one share of its own examples and another of all others: both."""
    own = {share_text(row[rank]) for rank, row in shares.by_rank.items()}
    others = {
        share_text(share)
        for rank, row in shares.by_rank.items()
        for source, share in enumerate(row)
        if source != rank
    }
    if len(own) != 1 or len(others) != 1:
        return []
    return [
        "Every example should count 1.00 on every rank.",
        f"Each rank holds its own examples {own.pop()} times, and those of others {others.pop()} "
        "times.",
    ]


def _is_empty(shares: Shares, ranks: Sequence[int]) -> bool:
    """True if these ranks have no examples that could be told apart."""
    return all(row[rank] is None for row in shares.by_rank.values() for rank in ranks)


def detail_lines(shares: Shares, width: int) -> Iterator[Line]:
    """What the means over a rank's examples hide, one line each."""
    if shares.only:
        yield only_in(shares.only, width)
    micro_batches = _micro_batches(shares)
    if micro_batches:
        yield Line(cut(f"  {micro_batches}", width))
    examples = _examples(shares)
    if examples:
        yield Line(cut(f"  {examples}", width))


def only_in(names: Sequence[str], width: int) -> Line:
    """Says that these parameters differ, and no others."""
    more = ", ..." if len(names) > MOST_NAMES else ""
    shown = ", ".join(shortened(name, LONGEST_NAME) for name in names[:MOST_NAMES])
    return Line(cut(f"  (in {shown}{more}; all other parameters are right)", width))


def _columns(verdict: Verdict, shares: Shares) -> list[list[int]]:
    """The ranks whose examples share a column."""
    world_size = verdict.case.ranks.world_size
    if world_size <= MOST_COLUMNS:
        return [[rank] for rank in range(world_size)]
    columns: list[list[int]] = []
    for rank in range(world_size):
        alike = columns and all(
            share_text(row[rank]) == share_text(row[columns[-1][0]])
            for row in shares.by_rank.values()
        )
        if alike:
            columns[-1].append(rank)
        else:
            columns.append([rank])
    return columns[:MOST_COLUMNS]


def _holders(ranks: Sequence[int], shares: Shares) -> str:
    if len(ranks) == len(shares.by_rank):
        return "every rank holds" if len(ranks) > 1 else f"rank {ranks[0]} holds"
    return f"{range_of_ranks(ranks)} {'holds' if len(ranks) == 1 else 'hold'}"


def _micro_batches(shares: Shares) -> str:
    """The shares of micro-batches, if they are the same on all ranks but not within a rank."""
    if shares.by_micro_batch is None:
        return ""
    least = _least(shares)
    held = {
        tuple(_small_text(share, least) for share in row)
        for rows in shares.by_micro_batch.values()
        for row in rows
    }
    if len(held) != 1 or len(set(next(iter(held)))) == 1:
        return ""
    numbers = next(iter(held))
    return f"each rank's {len(numbers)} micro-batches, in their order: {'  '.join(numbers)}"


def _examples(shares: Shares) -> str:
    """The examples that do not count once, if they are few."""
    least = _least(shares)
    held = {
        tuple(_small_text(share, least) for share in row)
        for row in (shares.by_example or {}).values()
    }
    if len(held) != 1:
        return ""
    row = next(iter(held))
    wrong: dict[str, list[int]] = {}
    for index, share in enumerate(row):
        if share not in ("1.00", "-"):
            wrong.setdefault(share, []).append(index)
    count = sum(map(len, wrong.values()))
    means = {share_text(share) for mean in shares.by_rank.values() for share in mean}
    # If the shares are those of whole ranks, the table shows them.
    if not wrong or 2 * count > len(row) or wrong.keys() <= means:
        return ""
    if len(wrong) > MOST_GROUPS or max(map(len, wrong.values())) > MOST_EXAMPLES:
        return ""
    texts = [f"{', '.join(map(str, indices))}: {share}" for share, indices in wrong.items()]
    return f"example{'s' if count > 1 else ''} {'; '.join(texts)}; all others 1.00"


LARGE = 1e6


def share_text(share: float | None) -> str:
    """The share with two digits, and one that is very large with three in all."""
    if share is None:
        return "-"
    text = text_of(share, ".2f" if abs(share) < LARGE else ".3g")
    return "0.00" if text == "-0.00" else text


def share_texts(row: Sequence[float | None], shares: Shares) -> Cells:
    """The shares of a row of the table. If all of them would be 0.00, the digits that count."""
    texts = tuple(map(share_text, row))
    if all(text in ("0.00", "-") for text in texts):
        rounding = shares.condition * max(shares.unexplained.values())  # of what the rank holds
        largest = max((abs(share) for share in row if share is not None), default=0.0)
        least = largest * max(rounding, ROUNDING)
        return tuple(_small_text(share, least) for share in row)
    return texts


def _least(shares: Shares) -> float:
    """A smaller share may be rounding."""
    return max(LEAST_SHARE, shares.condition * max(shares.unexplained.values()))


def _small_text(share: float | None, least: float) -> str:
    """The share with two digits; one that would be 0.00, and is not zero, with two that count."""
    text = share_text(share)
    if share is not None and text == "0.00" and abs(share) > least:
        return text_of(share, ".2g")
    return text
