"""Expected against held: the table of shares, or what the ranks hold in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.text import Line, paragraph, plural, ratio_text

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.diagnosis.shares import Shares
    from ddp_equivalence.report.verdict import Verdict


OF_ONE_RANK = re.compile(r"rank (?P<rank>\d+): (?P<what>.*)", re.DOTALL)

MOST_STRUCTURE = 3
MOST_GROUPS_IN_WORDS = 4

MULTIPLE = 1e-6
"""A rank holds a multiple of the big batch's gradient if this much of it at most is left over."""

MOST_LEFT = 0.001
"""If more than this part of the error is left over, the multiple is not what is wrong."""

ALIKE = 0.005
"""Ranks that are off by amounts that differ by less are off by the same amount."""


def held_lines(
    verdict: Verdict, most_rows: int, width: int, with_details: bool = True
) -> list[Line]:
    """What should be there and what is there. ``most_rows`` = 0: in words, without a table.

    ``with_details``: also by micro-batch and by example, if these differ.
    """
    comparison = verdict.comparison
    assert comparison is not None
    if comparison.structure:
        texts = _structure(comparison)
        shown = [Line(cut(f"  {text}", width)) for text in texts[:MOST_STRUCTURE]]
        more = len(texts) - len(shown)
        return [*shown, *([Line(f"  ... and {more} more")] if more > 0 else [])]
    if not comparison.differing:
        return [Line(cut(f"  {text}", width)) for text in _only_bits(comparison)]
    shares = verdict.shares
    if shares is not None and most_rows and can_be_shown(shares) and not all_are_right(shares):
        table_lines = short_table_lines(verdict, shares, most_rows, width)
        return [*table_lines, *(detail_lines(shares, width) if with_details else ())]
    lines = [line for text in _in_words(verdict, comparison) for line in paragraph(text, "  ")]
    right = [one for one in comparison.parameters if one.same]
    if right and all(one.ranks_agree for one in right):
        lines.append(only_in([one.name for one in comparison.differing], width))
    return lines


def _structure(comparison: Comparison) -> list[str]:
    """What is not as in the big batch, with the ranks of which it is true."""
    ranks_by_text: dict[str, list[int]] = {}
    for text in comparison.structure:
        match = OF_ONE_RANK.match(text)
        rank, what = (int(match["rank"]), match["what"]) if match else (-1, text)
        ranks_by_text.setdefault(what, []).append(rank)
    return [
        what if ranks == [-1] else f"{_on(ranks, comparison)}: {what}"
        for what, ranks in ranks_by_text.items()
    ]


def _on(ranks: list[int], comparison: Comparison) -> str:
    everyone = len(ranks) == len(comparison.ranks) > 1
    return "every rank" if everyone else range_of_ranks(ranks)


def _in_words(verdict: Verdict, comparison: Comparison) -> Iterator[str]:
    not_finite = _not_finite(comparison)
    if not_finite:
        yield f"{_hold(not_finite, comparison)} values that are not finite, or too large to square."
        return
    multiples = _multiples(comparison)
    if multiples is not None:
        for text, ranks in list(multiples.items())[:MOST_GROUPS_IN_WORDS]:
            yield f"{_hold(ranks, comparison)} {text} times what the big batch gives."
        return
    of = f"the {'updates' if verdict.compare == 'update' else 'gradients'} of the "
    shares = verdict.shares
    if shares is None:
        pass
    elif has_too_few_elements(shares):
        yield f"Too few elements differ to tell how often each of the {shares.pieces} counts."
    elif not can_be_shown(shares):
        yield f"What the ranks hold is no mixture of {of}{shares.pieces}."
    elif all_are_right(shares):
        yield f"To two digits, all {shares.pieces} count as often as they should."
    yield from _off_by(comparison)


def _only_bits(comparison: Comparison) -> Iterator[str]:
    """Every value is within its limit, and yet something is not as it must be."""
    apart = [one.name for one in comparison.parameters if not one.ranks_agree]
    if apart:
        count = len(comparison.parameters)
        yield (
            f"The ranks hold different bits in {len(apart)} of {count} "
            f"{plural(count, 'parameter')}; ranks that train together must hold the same."
        )


def _not_finite(comparison: Comparison) -> list[int]:
    return sorted(
        {
            error.rank
            for parameter in comparison.parameters
            for error in parameter.by_rank
            if 0 not in parameter.shape and not isfinite(error.distance)
        }
    )


def _multiples(comparison: Comparison) -> dict[str, list[int]] | None:
    """Multiple -> the ranks that hold it; None if a rank holds no multiple of the big batch."""
    found: dict[str, list[int]] = {}
    for rank in comparison.ranks:
        factor, rest, off = _nearest(comparison, rank)
        if rest > MULTIPLE or (off > MULTIPLE and rest > MOST_LEFT * off):
            return None
        text = ratio_text(factor)
        text = text.rstrip("0").rstrip(".") if "." in text else text
        found.setdefault(text, []).append(rank)
    return found


def _off_by(comparison: Comparison) -> Iterator[str]:
    """How far each rank is from the big batch, relative to its norm."""
    groups: list[tuple[float, list[int]]] = []
    for rank in comparison.ranks:
        off = _nearest(comparison, rank)[2]
        if groups and abs(groups[-1][0] - off) <= ALIKE * max(off, groups[-1][0]):
            groups[-1][1].append(rank)
        else:
            groups.append((off, [rank]))
    texts = [
        f"{_on(ranks, comparison)} {'is off ' if number == 0 else ''}by {_amount(off)}"
        for number, (off, ranks) in enumerate(groups[:MOST_GROUPS_IN_WORDS])
    ]
    texts[0] += " of the big batch's norm"
    if len(groups[0][1]) > 1 and len(groups) > 1:
        texts[0] = texts[0].replace(" is off", " are off", 1)
    text = ", ".join(texts) + (", ..." if len(groups) > MOST_GROUPS_IN_WORDS else ".")
    yield f"{text[:1].upper()}{text[1:]}"


def _nearest(comparison: Comparison, rank: int) -> tuple[float, float, float]:
    """(k, rest, off): k times the big batch is nearest; what is left over; how far it is off.

    Both are relative: ``rest`` to what the rank holds, ``off`` to the big batch.
    """
    errors = [
        (parameter.norm, error)
        for parameter in comparison.parameters
        for error in parameter.by_rank
        if error.rank == rank and parameter.norm > 0
    ]
    expected = sum(norm**2 for norm, _ in errors)
    if not expected:
        return 0.0, float("inf"), float("inf")
    factor = sum(error.factor * norm**2 for norm, error in errors) / expected
    held = sum(error.ratio * norm * error.ratio * norm for norm, error in errors)
    rest = max(0.0, 1 - factor**2 * expected / held) ** 0.5 if held > 0 else 0.0
    off = (sum((error.error * norm) ** 2 for norm, error in errors) / expected) ** 0.5
    return factor, rest, off


def _amount(part: float) -> str:
    return text_of(part, ".2f") if part >= 0.01 else text_of(part, ".2g")


def _hold(ranks: list[int], comparison: Comparison) -> str:
    """The ranks, and their verb, as the beginning of a sentence."""
    if len(ranks) == len(comparison.ranks) > 1:
        return "Every rank holds"
    return f"{range_of_ranks(ranks).capitalize()} {plural(len(ranks), 'holds', 'hold')}"


# Expected against held, as a table: how often the examples of each rank count.

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


def short_table_lines(verdict: Verdict, shares: Shares, most_rows: int, width: int) -> list[Line]:
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


# Text that must fit on one line.

CUT = "..."

ENDS = (re.compile(r"[.!?](?= )"), re.compile(r";(?= )"), re.compile(r"(?= )"))
"""Where a text may be cut: after a sentence, else after a clause, else after a word."""


def cut(text: str, width: int) -> str:
    """The text, ended with dots where it is too long."""
    return text if len(text) <= width else f"{text[: width - len(CUT)].rstrip()}{CUT}"


def shortened(name: str, most: int) -> str:
    """A name, with dots in its middle where it is too long; its end tells most."""
    if len(name) <= most:
        return name
    head = (most - len(CUT)) // 3
    return f"{name[:head]}{CUT}{name[len(name) - (most - len(CUT) - head) :]}"


def ended(text: str) -> str:
    """The text with a full stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def range_of_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0 to 7``."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"ranks {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:6]))
    return f"ranks {shown}{', ...' if len(numbers) > 6 else ''}"


def wrapped_lines(text: str, width: int, most: int, indent: str = "  ") -> list[Line]:
    """The text in at most so many lines.

    Where more would be needed, whole sentences are left out at its end, or clauses, or else words,
    and dots stand for them.
    """
    lines = paragraph(text, indent)
    if len(lines) <= most:
        return lines
    for end in ENDS:
        for found in reversed(list(end.finditer(text))):
            kept = text[: found.end()].rstrip()
            shown = kept if kept.endswith(CUT) else f"{kept} {CUT}"
            lines = paragraph(shown, indent)
            if len(lines) <= most and len(lines[-1].text) <= width:
                return lines
    return [Line(cut(f"{indent}{text}", width))]
