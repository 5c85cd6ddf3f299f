"""The table of shares: how often each rank, micro-batch and example is in what the ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.report.line import Line, Style, labelled, paragraph
from ddp_equivalence.report.short.shares import share_text, share_texts
from ddp_equivalence.report.wrapping import plural, rank_names, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.share_fit import ShareRow
    from ddp_equivalence.diagnosis.shares import Shares
    from ddp_equivalence.report.verdict import Verdict

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
