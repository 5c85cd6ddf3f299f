"""The ranks' gradients beside that of the big batch: how often the examples of each rank count in
what every rank holds, or that in words, and which parameters differ. A share of 1.00 is as often as
in the big batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, prod
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.report.blocks import WIDEST_SCREEN, Item, Listed
from ddp_equivalence.report.text import (
    Line,
    Style,
    aligned,
    cut,
    labelled,
    listed,
    paragraph,
    plural,
    range_of_ranks,
    rank_names,
    ranks_by,
    ratio_text,
    shortened,
)

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison, ParameterComparison
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
"""Where no mixture explains more than this part of what a rank holds, be it by the rounding of a
low precision, shares say nothing. A mixture that explains all but a part that is larger than
rounding was fitted to something else, such as a penalty on the weights."""

MOST_UNEXPLAINED = 0.01
"""What no mixture explains must be a smaller part than this of how far the shares are off."""

MOST_WEIGHTS = 6
"""More different weights than this, of both signs, are no counts."""


def can_be_shown(shares: Shares) -> bool:
    """True if what the ranks hold is a mixture of examples, and no other mixture fits as well."""
    unexplained = max(shares.unexplained.values())
    known = [share for row in _finest_rows(shares) for share in row if share is not None]
    off = max((abs(share - 1) for share in known), default=0.0)
    noise = unexplained / MOST_UNEXPLAINED
    is_noise = unexplained > ROUNDING and (min(known, default=0.0) < -OFF or OFF < off < noise)
    no_mixture = unexplained > min(shares.rounding, WORST_FIT)
    if no_mixture or is_noise or has_too_few_elements(shares):
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
LONGEST_OF_SEVERAL = 30
MOST_SHARES = 3
SHOULD_COUNT = "Every example should count 1.00 on every rank."
MOST_OF_GROUP = 8
"""So many examples with a share of their own are listed."""


@dataclass(frozen=True)
class ShareTable:
    """The shares by rank, with equal rows together. ``words``: the same without a table.
    ``is_told``: the report has named the parameters that they are of.
    """

    shares: Shares
    world_size: int
    words: Sequence[Line]
    is_told: bool = False

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
        cells = ((rank, self._cells(rank, row)) for rank, row in self.shares.by_rank.items())
        return list(ranks_by(cells).items())

    def _cells(self, rank: int, row: ShareRow) -> Cells:
        """What a rank holds of each column: one share, or the smallest and the largest."""
        texts = _row_texts([row[ranks[0]] for ranks in self._columns], self.shares)
        ranges = self.shares.ranges.get(rank) or [None] * len(row)
        both = [map(share_text, ranges[ranks[0]] or (None, None)) for ranks in self._columns]
        return tuple(x if a == b else f"{a} to {b}" for x, (a, b) in zip(texts, both, strict=True))

    def lines(self, shape: Shape) -> Sequence[Line]:
        """The table with as many rows as there may be; in words if there may be none."""
        if not shape.rows:
            return self.words
        # If the rows are too many, and every rank holds its own examples only, it says that.
        apart = [] if len(self._rows) <= shape.rows else _own_and_others(self.shares)
        details = [text for text in _details(self.shares) if text]
        exceptions = f"Every rank holds other shares: {details[-1]}." if details else ""
        fits = ": example" in exceptions and len(exceptions) + 2 <= shape.width
        if len(self._rows) == 1 and fits:
            apart, details = [SHOULD_COUNT, exceptions], details[:-1]
        are_right = {cell for cells, _ in self._rows for cell in cells} <= {"1.00", "-"}
        if are_right and not apart and not (details and shape.details):
            return self.words  # examples of one rank make up for each other
        texts = apart or list(self._texts(shape.rows))
        scope = [only_in(self.shares.only, shape.width - 2)] if self.shares.only else []
        scope = ["(in these; all other parameters are right)"] if self.is_told else scope
        shown = (*texts, *scope, *(details if shape.details else ()))
        return [Line(cut(f"  {text}", shape.width)) for text in shown]

    def _texts(self, most: int) -> Iterator[str]:
        columns, every_row = self._columns, list(self.shares.by_rank.values())
        known = (any(row[rank] is not None for row in every_row for rank in of) for of in columns)
        shown = self._rows if len(self._rows) <= most else self._rows[: most - 1]
        names = [holders(ranks, len(every_row), range_of_ranks) for _, ranks in shown]
        head, *rows = aligned(
            [
                ("examples of", *map(range_of_ranks, columns)),
                ("should count", *("1.00" if one else "-" for one in known)),
                *((name, *cells) for name, (cells, _) in zip(names, shown, strict=True)),
            ],
            narrowest=6,
        )
        has_more = sum(map(len, columns)) < self.world_size
        yield from (head + ("  ..." if has_more else ""), *rows)
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
    ranges = [one for of_rank in shares.ranges.values() for one in of_rank if one is not None]
    apart = any(share_text(least) != share_text(most) for least, most in ranges)
    on_average = " on average" if apart else ""
    return [
        SHOULD_COUNT,
        f"Each rank holds its own examples {own.pop()} times{on_average}, and those of others "
        f"{others.pop()} times.",
    ]


def only_in(names: Sequence[str], width: int) -> str:
    """Says on one line that these parameters differ, and no others. It names as many as fit."""
    short = [shortened(name, LONGEST_OF_SEVERAL) for name in names]
    named = [listed(short, most) for most in range(MOST_NAMES, 0, -1)]
    texts = [f"(in {some}; all other parameters are right)" for some in named]
    return next((one for one in texts if len(one) <= width), texts[-1])


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
    if len(wrong) > MOST_SHARES or max(map(len, wrong.values())) > MOST_OF_GROUP:
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


# On the screen: the table of shares, or what the ranks hold in words.

OF_ONE_RANK = re.compile(r"rank (?P<rank>\d+): (?P<what>.*)", re.DOTALL)

MOST_GROUPS = 4
MULTIPLE = 1e-6
"""A rank holds a multiple of the big batch's gradient if this much of it at most is left over."""

MOST_LEFT = 0.001
"""If more than this part of the error is left over, the multiple is not what is wrong."""

ALIKE = 0.005
"""Ranks that are off by amounts that differ by less are off by the same amount."""


def held(verdict: Verdict) -> list[Item | Line]:
    """The gradients that should be there and those that are there."""
    comparison, shares = verdict.comparison, verdict.shares
    assert comparison is not None
    width = min(settings.current().width, WIDEST_SCREEN)
    if comparison.structure:
        return [Listed(_structure(comparison))]
    if not comparison.differing:  # every value is within its limit
        apart = sum(not one.ranks_agree for one in comparison.parameters)
        count = len(comparison.parameters)
        bits = f"The ranks hold different bits in {apart} of {count} {plural(count, 'parameter')}"
        text = f"  {bits}; ranks that train together must hold the same."
        return [Line(cut(text, width))] if apart else []
    words = [line for text in _in_words(verdict, comparison) for line in paragraph(text, "  ")]
    right = [one for one in comparison.parameters if one.same]
    differing = [one.name for one in comparison.differing]
    if right and all(one.ranks_agree for one in right) and _tells_more(verdict, differing):
        words.append(Line(cut(f"  {only_in(differing, width - 2)}", width)))
    if shares is not None and can_be_shown(shares) and not all_are_right(shares):
        is_told = bool(shares.only) and _are_told(verdict, shares.only)
        return [ShareTable(shares, verdict.case.ranks.world_size, words, is_told)]
    return list(words)


def _tells_more(verdict: Verdict, names: Sequence[str]) -> bool:
    """True if these names say more than the number of parameters that differ, and the name of the
    worst one, and stand nowhere above.
    """
    return 1 < len(names) <= MOST_NAMES and not _are_told(verdict, names)


def _are_told(verdict: Verdict, names: Sequence[str]) -> bool:
    """True if what stands above has named all of these parameters."""
    best, found = verdict.best, verdict.localisation.whereabouts
    told = "" if best is None else best.detail
    if best is None and found is not None and not verdict.repairs.text:  # else it is not shown
        told = found.sentence
    return all(name in told for name in names)


def _structure(comparison: Comparison) -> list[str]:
    """The names, shapes and types that are not as in the big batch, with their ranks."""
    matches = ((OF_ONE_RANK.match(text), text) for text in comparison.structure)
    ranks = ranks_by(
        ((int(match["rank"]), match["what"]) if match else (-1, text)) for match, text in matches
    )
    # A rank may have no gradient of what it does not own, so what no rank has comes first.
    most_first = sorted(ranks.items(), key=lambda one: -len(one[1]))
    return [what if of == [-1] else f"{_on(of, comparison)}: {what}" for what, of in most_first]


def _on(ranks: list[int], comparison: Comparison) -> str:
    everyone = len(ranks) == len(comparison.ranks) > 1
    return "every rank" if everyone else range_of_ranks(ranks)


def _hold(ranks: list[int], comparison: Comparison) -> str:
    text = holders(ranks, len(comparison.ranks), range_of_ranks)
    return f"{text[:1].upper()}{text[1:]}"


def _in_words(verdict: Verdict, comparison: Comparison) -> Iterator[str]:
    distances = (
        (error.rank, error.distance)
        for parameter in comparison.parameters
        if 0 not in parameter.shape
        for error in parameter.by_rank
    )
    not_finite = sorted({rank for rank, distance in distances if not isfinite(distance)})
    if not_finite:
        losses = [
            rank
            for rank, seen in verdict.observed.items()
            if any(one.loss is not None and not isfinite(one.loss) for one in seen.backwards)
        ]
        loss = f"; the loss is not finite on {rank_names(losses)}" if losses else ""
        held = "values that are not finite, or too large to square"
        yield f"{_hold(not_finite, comparison)} {held}{loss}."
        return
    multiples = _multiples(comparison)
    if multiples is not None:
        if verdict.best is not None and verdict.best.is_guess and len(multiples) == 1:
            return  # the headline says so
        for text, ranks in list(multiples.items())[:MOST_GROUPS]:
            yield f"{_hold(ranks, comparison)} {text} times what the big batch gives."
        return
    shares = verdict.shares
    if shares is None:
        pass
    elif has_too_few_elements(shares):
        yield f"Too few elements differ to tell how often each of the {shares.pieces} counts."
    elif can_be_shown(shares) and all_are_right(shares):
        yield f"To two digits, all {shares.pieces} count as often as they should."
    yield _off_by(comparison)


def _multiples(comparison: Comparison) -> dict[str, list[int]] | None:
    """Multiple -> the ranks that hold it; None if a rank holds no multiple of the big batch."""
    found: list[tuple[int, str]] = []
    for rank in comparison.ranks:
        factor, rest, off = _nearest(comparison.parameters, rank)
        if rest > MULTIPLE or (off > MULTIPLE and rest > MOST_LEFT * off):
            return None
        text = ratio_text(factor)
        found.append((rank, text.rstrip("0").rstrip(".") if "." in text else text))
    return ranks_by(found)


def _off_by(comparison: Comparison) -> str:
    """How far each rank is from the big batch, relative to the norm of what differs there."""
    groups: list[tuple[float, list[int]]] = []
    for rank in comparison.ranks:
        off = _nearest(comparison.differing, rank)[2]
        if groups and abs(groups[-1][0] - off) <= ALIKE * max(off, groups[-1][0]):
            groups[-1][1].append(rank)
        else:
            groups.append((off, [rank]))
    first = groups[0][1]
    verb = "are" if len(first) > 1 and len(groups) > 1 else "is"
    (text, *others) = [
        f"{_on(ranks, comparison)} by {text_of(off, '.2f' if off >= 0.01 else '.2g')}"
        for off, ranks in groups
    ]
    is_all = len(comparison.differing) == len(comparison.parameters)
    where = "" if is_all else " in the parameters that differ"
    text = text.replace(" by ", f" {verb} off by ", 1) + f" of the big batch's norm{where}"
    text = listed([text, *others], MOST_GROUPS)
    return f"{text[:1].upper()}{text[1:]}."


def _nearest(of: Sequence[ParameterComparison], rank: int) -> tuple[float, float, float]:
    """(k, rest, off): k times the big batch is nearest; what is left over; how far it is off.

    Both are relative: ``rest`` to what the rank holds, ``off`` to the big batch.
    """
    errors = [
        (parameter.norm, error)
        for parameter in of
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


# On the screen: how many parameters differ, and the worst.

LONGEST_NAME = 45
SHORTEST_NAME = 16

ORDINARY_LANES = ("gloo", "gloo_fallback")
"""On any other lane the report says which it was: it takes no line of its own."""


def how_many_differ(verdict: Verdict, left_out: int = 0) -> str:
    """The count, and the error and limit of the worst; "" if no parameter differs.

    ``left_out``: so many characters of its name. Dots may stand in a name, and not for a number.
    """
    comparison = verdict.comparison
    assert comparison is not None
    if not comparison.differing:
        return ""
    differing, of = comparison.differing, comparison.parameters
    telling = (one for one in differing if not one.limit.only_rounding)
    worst, count = next(telling, differing[0]), len(differing)
    longest = max(min(len(worst.name), LONGEST_NAME) - left_out, SHORTEST_NAME)
    compared = " that can be compared" if comparison.structure else ""
    wrong, when = verdict.wrong_step, ""
    if wrong is not None and wrong.differs == "gradients" and wrong.expected > 1:
        when = f"At step {wrong.number} of {wrong.expected}, "
    text = (
        f"{when}{count} of {len(of)} {plural(len(of), 'parameter')}{compared} "
        f"{plural(count, 'differs', 'differ')}"
        f"{', most' if count > 1 else ':'} {shortened(worst.name, longest)}"
    )
    error, lane = worst.worst, verdict.lane.name
    if error.alone or error.error <= worst.limit.relative:
        off, limit = error.element, worst.limit.element
        text += f", element {list(error.place)} on rank {error.rank}:"
    else:
        off, limit = error.error, worst.limit.relative
        text += ":" if count > 1 else ","
    where = "" if lane in ORDINARY_LANES else f", lane {lane}"
    return f"{text} error {text_of(off, '.2g')}, limit {text_of(limit, '.2g')}{where}."


# What was asked: the big batch, what every rank should hold, and what the losses divide by.


def asked_lines(verdict: Verdict) -> list[Line]:
    """The big batch and the ranks, the promise of a strategy, and whose mean the loss is."""
    layout = verdict.case.ranks
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes (simulated on one host)"
    examples = " + ".join(map(str, verdict.examples))
    ranks = f"{layout.world_size} {plural(layout.world_size, 'rank')} on {nodes}"
    return [
        *labelled("Compared:  ", f"the big batch, {examples} examples, and {ranks}"),
        *labelled("Promise:   ", verdict.asked.promise),
        *_divisors_lines(verdict),
    ]


def _divisors_lines(verdict: Verdict) -> list[Line]:
    """The divisors of the losses and of the reduction, and those that would be right."""
    divisors = verdict.divisors
    named_otherwise = verdict.cause is not None and not any(
        one.wrong_divisor for one in HYPOTHESES if one.name in verdict.causes
    )
    if divisors is None or named_otherwise:
        return []
    reduction = divisors.reduction
    if divisors.kind == "sum":
        text = "The loss is a sum, divided by nothing: the ranks' losses add up to the big batch's"
    else:
        counts = _of_every_rank(divisors.counts, ".6g")
        text = (
            f"The loss of a rank's own shard is a mean over {counts} {divisors.unit}; "
            f"the loss of the big batch is a mean over {divisors.big_batch:g}"
        )
    count = 0 if reduction is None else round(reduction)
    if reduction is not None and count >= 1 and abs(reduction - count) < 1e-3 * reduction:
        divisor = "nothing" if count == 1 else f"{count}"
        text += f"; altogether the ranks' gradients were divided by {divisor}"
    if divisors.right_factors is not None and verdict.cause is not None:
        factors = _of_every_rank(divisors.right_factors, ".4g")
        text += f". To be right, multiply the loss as it is now by {factors}"
        if divisors.kind == "mean" and reduction is not None:
            sum_by = f"{text_of(reduction, '.4g')} / {divisors.big_batch:g}"
            text += f", or the summed loss by {sum_by}"
    return labelled("Whose mean is it? ", f"{text}.", hang=4)


def _of_every_rank(numbers: tuple[float, ...], number_format: str) -> str:
    """The number that all ranks have in common, or else the number of each rank, in order."""
    texts = [text_of(number, number_format) for number in numbers]
    return texts[0] if len(set(texts)) == 1 else f"{listed(texts, 8)} (by rank)"


# Which parameters differ, by how much, and the limit of each.

MOST_PARAMETERS = 20
MOST_RIGHT = 8
MOST_DISAGREEING = 4

NUMBER_COLUMNS = 48
"""Columns that the numbers of a row and its indent take."""


def parameters_lines(verdict: Verdict) -> list[Line]:
    """The table of the parameters that differ, worst first, and the names of those that are right.

    If no parameter differs, only those on which the ranks do not agree are named.
    """
    comparison = verdict.comparison
    assert comparison is not None
    differing, parameters = comparison.differing, comparison.parameters
    apart = [one.name for one in parameters if not one.ranks_agree]
    disagree = f"{len(apart)} of {len(parameters)} parameters: {listed(apart, MOST_DISAGREEING)}"
    bits = labelled("Ranks do not agree bit for bit on ", disagree if apart else "")
    if not differing:
        return bits
    title = f"Parameters that differ: {len(differing)} of {len(parameters)}"
    shown = differing[:MOST_PARAMETERS]
    names = [f"{parameter.name}  {parameter.shape}" for parameter in shown]
    width = min(max(map(len, [title, *names])), settings.current().width - NUMBER_COLUMNS)
    header = f"  {title:<{width + 4}}{'error':>9}{'floor':>9}{'limit':>9}{'ratio of norms':>17}"
    lines = [Line(header, Style.LABEL, styled=2 + len(title))]
    for name, parameter in zip(names, shown, strict=True):
        if len(name) > width:  # then its numbers stand below it, in their columns
            lines.append(Line(f"    {name}"))
            name = ""
        lines.append(Line(f"    {name:<{width + 2}}{_numbers(parameter)}"))
        lines += _element(parameter)
    if more := len(differing) - len(shown):
        lines.append(Line(f"    ... and {more} more (the worst are shown)"))
    right = [one.name for one in parameters if one.same and one.ranks_agree]
    if right:  # often they tell where the difference comes from
        lines += paragraph(f"right: {listed(right, MOST_RIGHT)}", "    ")
    reasons = Counter(parameter.limit.reason for parameter in differing)
    return [*lines, Line(f"    limit: {'; '.join(reasons)}"), *bits]


def _numbers(parameter: ParameterComparison) -> str:
    worst, limit = parameter.worst, parameter.limit
    numbers = (text_of(one, ".1e") for one in (worst.error, limit.floor, limit.relative))
    return f"{''.join(f'{number:>9}' for number in numbers)}{ratio_text(worst.ratio):>17}"


def _element(parameter: ParameterComparison) -> Iterator[Line]:
    """The worst element, if it alone is wrong, or if the parameter as a whole is right."""
    worst = parameter.worst
    if prod(parameter.shape) > 1 and (worst.alone or worst.error <= parameter.limit.relative):
        off, limit = text_of(worst.element, ".1e"), text_of(parameter.limit.element, ".1e")
        place = f"element {list(worst.place)} on rank {worst.rank}"
        yield Line(f"      {place} is off by {off}, limit {limit}")
