"""What the big batch's gradient is, what the ranks hold, and which parameters differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isnan, prod
from typing import TYPE_CHECKING

from ddp_equivalence.case import settings
from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.short.held import share_text, share_texts
from ddp_equivalence.report.text import (
    Line,
    Style,
    labelled,
    paragraph,
    plural,
    rank_names,
    ratio_text,
    wrapped,
)

if TYPE_CHECKING:
    from ddp_equivalence.comparison.comparison import Comparison, ParameterComparison
    from ddp_equivalence.diagnosis.shares import ShareRow, Shares
    from ddp_equivalence.report.verdict import Verdict


# The argument: what the big batch's gradient is, and which multiple of it the ranks hold.
#
# Its lines begin with Let, Then, With, But. The last ones say what the losses are divided by.

WRONG_DIVISORS = frozenset(
    (
        *("sum_not_mean", "mean_not_sum", "averaged_twice", "divided_by_local_world_size"),
        *("uneven_shards_weighted_equally", "token_counts_weighted_equally"),
        *("local_loss_summed", "accumulation_not_divided", "divided_by_another_count"),
    )
)
"""Causes that are a wrong divisor, which the right divisor corrects."""

NO_MULTIPLE = 0.01
"""A rank holds no multiple of g if the nearest multiple leaves more than this unexplained."""

NOT_NEAR = 0.5
"""If the nearest multiple leaves more than this, it says nothing."""

ROUNDING = 1e-7
"""An unexplained part below this is rounding: it is computed as a difference of two squares."""


def expected_and_held_lines(verdict: Verdict) -> list[Line]:
    """The lines Let, Then, With (for updates), But, and whose mean it is."""
    comparison = verdict.comparison
    assert comparison is not None
    layout = verdict.case.ranks
    nodes = "1 node" if layout.nodes == 1 else f"{layout.nodes} nodes (simulated on one host)"
    quantity = "gradient of" if verdict.compare == "gradients" else "update of the weights by"
    examples = " + ".join(map(str, verdict.examples))
    lines = _line_of_argument(
        "Let",
        f"g = {quantity} the big batch, {examples} examples; "
        f"W = {layout.world_size} {plural(layout.world_size, 'rank')} on {nodes}",
    )
    for text in _held(comparison):
        lines += _line_of_argument("Then", text)
    if verdict.compare == "update":
        steps = len(verdict.examples)
        sgd = f"plain SGD, learning rate {verdict.lr:g}, {steps} {plural(steps, 'step')}"
        lines += _line_of_argument("With", f"{sgd}: is that what the step does?")
    lines += _line_of_argument("But", verdict.promise or "every rank should hold 1 g")
    return [*lines, *_divisors_lines(verdict)]


def _line_of_argument(word: str, text: str) -> list[Line]:
    return [Line(line) for line in wrapped(f"  {word:<7}{text}", "         ", first="")]


def _divisors_lines(verdict: Verdict) -> list[Line]:
    """What the losses and the reduction divide by, and what would be right."""
    divisors = verdict.divisors
    named_otherwise = verdict.cause is not None and not WRONG_DIVISORS & set(verdict.causes)
    if divisors is None or named_otherwise:
        return []
    if divisors.kind == "sum":
        text = "The loss is a sum, divided by nothing: the ranks' losses add up to the big batch's"
    else:
        counts = _of_every_rank(divisors.counts, ".6g")
        text = (
            f"The loss of a rank's own shard is a mean over {counts} {divisors.unit}; "
            f"the loss of the big batch is a mean over {divisors.big_batch:g}"
        )
    if divisors.reduction is not None and _is_whole(divisors.reduction):
        divisor = "nothing" if round(divisors.reduction) == 1 else f"{round(divisors.reduction)}"
        text += f"; altogether the ranks' gradients were divided by {divisor}"
    if divisors.right_factors is not None and verdict.cause is not None:
        factors = _of_every_rank(divisors.right_factors, ".4g")
        text += f". To be right, multiply the loss as it is now by {factors}"
        if divisors.kind == "mean" and divisors.reduction is not None:
            reduction = text_of(divisors.reduction, ".4g")
            text += f", or the summed loss by {reduction} / {divisors.big_batch:g}"
    question = "  Whose mean is it?"
    first, *more = wrapped(f"{question} {text}.", "    ", first="")
    return [Line(first, Style.LABEL, styled=len(question)), *map(Line, more)]


def _is_whole(number: float) -> bool:
    """True for a number of ranks, examples or micro-batches, up to rounding."""
    return round(number) >= 1 and abs(number - round(number)) < 1e-3 * number


def _of_every_rank(numbers: tuple[float, ...], number_format: str) -> str:
    """The number that all ranks have in common, or else the number of each rank, in order."""
    texts = [text_of(number, number_format) for number in numbers]
    if len(set(texts)) == 1:
        return texts[0]
    shown = ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")
    return f"{shown} (by rank)"


def _held(comparison: Comparison) -> Iterator[str]:
    """One sentence for each group of ranks that hold the same multiple of the big batch."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank in comparison.ranks:
        text = _held_by_rank(comparison, rank)
        if text is not None:
            ranks_by_text.setdefault(text, []).append(rank)
    for text, ranks in ranks_by_text.items():
        if len(ranks) == len(comparison.ranks) > 1:
            yield f"every rank holds {text}"
        else:
            yield f"{rank_names(ranks)} {'holds' if len(ranks) == 1 else 'hold'} {text}"


def _held_by_rank(comparison: Comparison, rank: int) -> str | None:
    """The multiple k g that is nearest to what the rank holds; None if g is zero."""
    errors = [
        (parameter.norm, error)
        for parameter in comparison.parameters
        for error in parameter.by_rank
        if error.rank == rank and parameter.norm > 0
    ]
    expected = sum(norm**2 for norm, _ in errors)
    if not expected:
        return None
    factor = sum(error.factor * norm**2 for norm, error in errors) / expected
    held = sum((error.ratio * norm) ** 2 for norm, error in errors)
    unexplained = max(0.0, 1 - factor**2 * expected / held) ** 0.5 if held > 0 else 0.0
    if isnan(factor):
        return "NaN: not a number"
    if unexplained > NOT_NEAR:
        return "no multiple of g, and nothing near one"
    rest = f"{text_of(unexplained, '.2g')} of the norm"
    if unexplained > NO_MULTIPLE:
        return f"no multiple of g (nearest: {text_of(factor, '.2f')} g, {rest} unexplained)"
    rest = "nothing" if unexplained < ROUNDING else rest
    return f"{ratio_text(factor)} g   (unexplained: {rest})"


# The table of shares: how often each rank, micro-batch and example is in what the ranks hold.

MOST_RANKS = 8
MOST_EXAMPLES = 12
MOST_NAMES = 3
FIRST_COLUMN = 26
"""Columns before the first number."""

OFF = 0.005
"""A share that differs from 1 by more than this is not printed as 1.00."""

NOTHING = 1e-6
"""An unexplained part below this is rounding."""


def shares_lines(verdict: Verdict) -> list[Line]:
    """The block, or why there is none."""
    shares = verdict.shares
    if shares is None:
        why = verdict.why_no_shares
        return labelled("No shares of examples: ", why.reason) if why else []
    return [
        *_title(shares),
        *_table(verdict, shares),
        *_micro_batches(shares),
        *_examples(shares),
        *_conditions(shares),
    ]


def _title(shares: Shares) -> list[Line]:
    parameters = ""
    if shares.only:
        more = ", ..." if len(shares.only) > MOST_NAMES else ""
        parameters = f" of {', '.join(shares.only[:MOST_NAMES])}{more}"
    title = f"Share of each rank's examples in the result{parameters}"
    lines = wrapped(f"{title} (1.00 = as often as in the big batch)", "  ")
    return [Line(line, Style.LABEL) for line in lines]


def _table(verdict: Verdict, shares: Shares) -> Iterator[Line]:
    layout = verdict.case.ranks
    ranks = range(min(layout.world_size, MOST_RANKS))
    nodes = [layout.rows[rank].node for rank in ranks]
    first_of_node = [rank == 0 or nodes[rank] != nodes[rank - 1] for rank in ranks]
    node_names = [f"node {nodes[rank]}" if first_of_node[rank] else "" for rank in ranks]
    yield _row("", node_names)
    yield _row("", [f"rank {rank}" for rank in ranks])
    yield _row("expected", [_share_text(1.0) for _ in ranks])
    ranks_by_row: dict[tuple[str, ...], list[int]] = {}
    for rank, row in shares.by_rank.items():
        cells = tuple(_share_text(row[r]) for r in ranks)
        if set(cells) <= {_share_text(0.0), _share_text(None)}:
            cells = share_texts([row[r] for r in ranks], shares)
        ranks_by_row.setdefault(cells, []).append(rank)
    for cells, holders in ranks_by_row.items():
        everyone = len(holders) == len(shares.by_rank)
        name = "measured" if everyone else f"measured, {rank_names(holders)}"
        note = "     same on all ranks" if everyone and len(holders) > 1 else ""
        yield _row(name, cells, note)
    if layout.world_size > MOST_RANKS:
        yield Line(f"    (the first {MOST_RANKS} of {layout.world_size} ranks)")


def _row(name: str, cells: Sequence[str], note: str = "") -> Line:
    numbers = "".join(f"{cell:>9}" for cell in cells)
    return Line(f"    {name:<{FIRST_COLUMN - 4}}{numbers}{note}")


def _micro_batches(shares: Shares) -> Iterator[Line]:
    """The shares of every rank's micro-batches, where those of one rank do not count alike."""
    by_micro_batch = shares.by_micro_batch
    if by_micro_batch is None:
        return
    if not any(_differ(row) for rows in by_micro_batch.values() for row in rows):
        return
    yield Line("    by micro-batch, in the order in which they ran")
    ranks_by_text: dict[str, list[int]] = {}
    for rank, rows in list(by_micro_batch.items())[:MOST_RANKS]:
        text = "   ".join(
            f"rank {source}: {' '.join(map(_share_text, row))}" for source, row in enumerate(rows)
        )
        ranks_by_text.setdefault(text, []).append(rank)
    for text, ranks in ranks_by_text.items():
        holders = "" if len(ranks) == len(by_micro_batch) else f" {rank_names(ranks)}"
        yield from paragraph(f"measured{holders}:  {text}", "      ")


def _examples(shares: Shares) -> Iterator[Line]:
    """Single examples whose share is not 1.00, if these are the exceptions."""
    if not shares.by_example:
        return
    everyone = len({tuple(map(_share_text, row)) for row in shares.by_example.values()}) == 1
    for rank, row in list(shares.by_example.items())[:MOST_RANKS]:
        wrong = [
            f"{index}: {_share_text(share)}"
            for index, share in enumerate(row)
            if share is not None and abs(share - 1) > OFF
        ]
        if not wrong or len(wrong) > MOST_EXAMPLES or 2 * len(wrong) > len(row):
            continue  # None is wrong, or so many that a list of single examples says little.
        where = "" if everyone else f" on rank {rank}"
        word = plural(len(wrong), "example")
        yield from paragraph(f"{word}{where} {', '.join(wrong)}; all others 1.00", "    ")
        if everyone:
            return


def _conditions(shares: Shares) -> list[Line]:
    unexplained = max(shares.unexplained.values())
    rest = "nothing" if unexplained < NOTHING else f"{text_of(unexplained, '.2g')} of the norm"
    text = (
        f"fit of the {shares.pieces}' gradients on {shares.elements} elements; "
        f"condition number {text_of(shares.condition, '.3g')}; unexplained: {rest}"
    )
    if shares.why_not_examples:
        text += f" (not fitted by example, because {shares.why_not_examples})"
    return paragraph(text, "    ")


def _differ(row: ShareRow) -> bool:
    known = [share for share in row if share is not None]
    return bool(known) and max(known) - min(known) > OFF


def _share_text(share: float | None) -> str:
    return "0.00" if share is not None and abs(share) < OFF else share_text(share)


# The numbers: which parameters differ, by how much, and the limit of each.

MOST_PARAMETERS = 20
MOST_RIGHT = 8
MOST_DISAGREEING = 4

NUMBER_COLUMNS = 48
"""Columns that the numbers of a row and its indent take."""


def structure_lines(verdict: Verdict) -> list[Line]:
    """Names, shapes and types that are not those of the big batch, and ranks that disagree."""
    comparison = verdict.comparison
    assert comparison is not None
    structure = comparison.structure[:MOST_PARAMETERS]
    lines = [Line(f"    {text}") for text in structure]
    more = len(comparison.structure) - len(structure)
    if more > 0:
        lines.append(Line(f"    ... and {more} more"))
    disagreeing = [one.name for one in comparison.parameters if not one.ranks_agree]
    if disagreeing:
        more_names = ", ..." if len(disagreeing) > MOST_DISAGREEING else ""
        names = ", ".join(disagreeing[:MOST_DISAGREEING]) + more_names
        lines += paragraph(
            f"the ranks do not agree bit for bit on {len(disagreeing)} of "
            f"{len(comparison.parameters)} parameters: {names}",
            "    ",
        )
    return [Line("  Structure", Style.LABEL), *lines] if lines else []


def parameters_lines(verdict: Verdict) -> list[Line]:
    """The table of the parameters that differ, worst first, and the names of those that are right.

    It is empty if no parameter differs.
    """
    comparison = verdict.comparison
    assert comparison is not None
    differing = comparison.differing
    if not differing:
        return []
    title = f"Parameters that differ: {len(differing)} of {len(comparison.parameters)}"
    shown = differing[:MOST_PARAMETERS]
    names = [f"{parameter.name}  {parameter.shape}" for parameter in shown]
    widest = settings.current().width - NUMBER_COLUMNS
    width = min(max(map(len, [title, *names])), widest)
    header = f"  {title:<{width + 4}}{'error':>9}{'floor':>9}{'limit':>9}{'ratio of norms':>17}"
    lines = [Line(header, Style.LABEL, styled=2 + len(title))]
    for name, parameter in zip(names, shown, strict=True):
        if len(name) > width:  # then its numbers stand below it, in their columns
            lines.append(Line(f"    {name}"))
            name = ""
        lines.append(Line(f"    {name:<{width + 2}}{_numbers(parameter)}"))
        lines += [Line(f"      {text}") for text in _element(parameter)]
    if len(differing) > len(shown):
        more = len(differing) - len(shown)
        lines.append(Line(f"    ... and {more} more (the worst are shown)"))
    lines += _right(comparison)
    reasons = Counter(parameter.limit.reason for parameter in differing)
    return [*lines, Line(f"    limit: {'; '.join(reasons)}")]


def _right(comparison: Comparison) -> list[Line]:
    """The parameters that are right: often they tell where the difference comes from."""
    right = [one.name for one in comparison.parameters if one.same and one.ranks_agree]
    if not right:
        return []
    more = f", ... ({len(right)} in all)" if len(right) > MOST_RIGHT else ""
    return paragraph(f"right: {', '.join(right[:MOST_RIGHT])}{more}", "    ")


def _numbers(parameter: ParameterComparison) -> str:
    worst, limit = parameter.worst, parameter.limit
    numbers = (text_of(one, ".1e") for one in (worst.error, limit.floor, limit.relative))
    return f"{''.join(f'{number:>9}' for number in numbers)}{ratio_text(worst.ratio):>17}"


def _element(parameter: ParameterComparison) -> Iterator[str]:
    """The worst element, if it alone is wrong, or if the parameter as a whole is right."""
    worst = parameter.worst
    if prod(parameter.shape) > 1 and (worst.alone or worst.error <= parameter.limit.relative):
        yield (
            f"element {list(worst.place)} on rank {worst.rank} is off by "
            f"{text_of(worst.element, '.1e')}, limit {text_of(parameter.limit.element, '.1e')}"
        )
