"""Expected against held: the table of shares, or what the ranks hold in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, paragraph
from ddp_equivalence.report.short import shares as table
from ddp_equivalence.report.short.text import cut, range_of_ranks
from ddp_equivalence.report.wrapping import plural, ratio_text

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison
    from ddp_equivalence.report.verdict import Verdict

OF_ONE_RANK = re.compile(r"rank (?P<rank>\d+): (?P<what>.*)", re.DOTALL)

MOST_STRUCTURE = 3
MOST_GROUPS = 4

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
    if (
        shares is not None
        and most_rows
        and table.can_be_shown(shares)
        and not table.all_are_right(shares)
    ):
        table_lines = table.table_lines(verdict, shares, most_rows, width)
        return [*table_lines, *(table.detail_lines(shares, width) if with_details else ())]
    lines = [line for text in _in_words(verdict, comparison) for line in paragraph(text, "  ")]
    right = [one for one in comparison.parameters if one.same]
    if right and all(one.ranks_agree for one in right):
        lines.append(table.only_in([one.name for one in comparison.differing], width))
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
        for text, ranks in list(multiples.items())[:MOST_GROUPS]:
            yield f"{_hold(ranks, comparison)} {text} times what the big batch gives."
        return
    of = f"the {'updates' if verdict.compare == 'update' else 'gradients'} of the "
    shares = verdict.shares
    if shares is None:
        pass
    elif table.has_too_few_elements(shares):
        yield f"Too few elements differ to tell how often each of the {shares.pieces} counts."
    elif not table.can_be_shown(shares):
        yield f"What the ranks hold is no mixture of {of}{shares.pieces}."
    elif table.all_are_right(shares):
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
        for number, (off, ranks) in enumerate(groups[:MOST_GROUPS])
    ]
    texts[0] += " of the big batch's norm"
    if len(groups[0][1]) > 1 and len(groups) > 1:
        texts[0] = texts[0].replace(" is off", " are off", 1)
    text = ", ".join(texts) + (", ..." if len(groups) > MOST_GROUPS else ".")
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
