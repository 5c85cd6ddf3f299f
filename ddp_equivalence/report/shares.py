"""The picture: how often each rank's, node's, micro-batch's and example's gradient is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddp_equivalence.report.wrapping import of_ranks, plural, wrapped

if TYPE_CHECKING:
    from ddp_equivalence.diagnosis.share_fit import ShareRow
    from ddp_equivalence.diagnosis.shares import Shares
    from ddp_equivalence.report.verdict import Verdict

MOST_RANKS = 8
MOST_EXAMPLES = 12
HEAD = 26
"""Columns before the first number."""

OFF = 0.005
"""A share that reads as another number than 1.00."""


def shares_lines(verdict: Verdict) -> list[str]:
    """The block, or why there is none."""
    shares = verdict.shares
    if shares is None:
        why = verdict.why_no_shares
        return wrapped(f"No shares of examples: {why}", "  ") if why else []
    lines = _title(shares)
    lines += _table(verdict, shares)
    lines += _micro_batches(shares)
    lines += _examples(shares)
    return [*lines, *_conditions(shares)]


def _title(shares: Shares) -> list[str]:
    of = ""
    if shares.only:
        names = ", ".join(shares.only[:3]) + (", ..." if len(shares.only) > 3 else "")
        of = f" of {names}"
    return wrapped(
        f"Share of each rank's examples in the result{of} (1.00 = as often as in the big batch)",
        "  ",
    )


def _table(verdict: Verdict, shares: Shares) -> Iterator[str]:
    layout = verdict.case.ranks
    ranks = range(min(layout.world_size, MOST_RANKS))
    nodes = [layout.rows[rank].node for rank in ranks]
    first = [rank == 0 or nodes[rank] != nodes[rank - 1] for rank in ranks]
    yield " " * HEAD + "".join(f"{f'node {nodes[r]}' if first[r] else '':>9}" for r in ranks)
    yield " " * HEAD + "".join(f"{f'rank {rank}':>9}" for rank in ranks)
    yield f"    {'expected':<{HEAD - 4}}" + "".join(f"{1:>9.2f}" for _ in ranks)
    rows: dict[tuple[str, ...], list[int]] = {}
    for rank, row in shares.by_rank.items():
        rows.setdefault(tuple(_share(row[r]) for r in ranks), []).append(rank)
    for text, held_by in rows.items():
        everyone = len(held_by) == len(shares.by_rank)
        name = "measured" if everyone else f"measured, {of_ranks(held_by)}"
        note = "     same on all ranks" if everyone and len(held_by) > 1 else ""
        yield f"    {name:<{HEAD - 4}}" + "".join(f"{one:>9}" for one in text) + note
    if layout.world_size > MOST_RANKS:
        yield f"    (the first {MOST_RANKS} of {layout.world_size} ranks)"


def _micro_batches(shares: Shares) -> Iterator[str]:
    """By micro-batch where they do not all count alike."""
    found = shares.by_micro_batch
    if found is None or not any(_apart(row) for of_ranks in found.values() for row in of_ranks):
        return
    yield "    by micro-batch, in turn"
    told: dict[str, list[int]] = {}
    for rank, by_rank in list(found.items())[:MOST_RANKS]:
        text = "   ".join(
            f"rank {other}: {' '.join(map(_share, row))}" for other, row in enumerate(by_rank)
        )
        told.setdefault(text, []).append(rank)
    for text, ranks in told.items():
        who = "" if len(ranks) == len(found) else f" {of_ranks(ranks)}"
        yield from wrapped(f"measured{who}:  {text}", "      ")


def _examples(shares: Shares) -> Iterator[str]:
    """Single examples that count otherwise than in the big batch."""
    if shares.by_example is None or not shares.by_example:
        return
    for rank, row in list(shares.by_example.items())[:MOST_RANKS]:
        odd = [
            f"{index}: {_share(share)}"
            for index, share in enumerate(row)
            if share is not None and abs(share - 1) > OFF
        ]
        if not odd or len(odd) > MOST_EXAMPLES or 2 * len(odd) > len(row):
            continue  # then it is not single examples that are off
        everyone = len({tuple(map(_share, one)) for one in shares.by_example.values()}) == 1
        who = "" if everyone else f" on rank {rank}"
        yield from wrapped(
            f"{plural(len(odd), 'example')}{who} {', '.join(odd)}; all others 1.00", "    "
        )
        if everyone:
            return


def _conditions(shares: Shares) -> Iterator[str]:
    rest = max(shares.unexplained.values())
    left = "nothing" if rest < 1e-6 else f"{rest:.2g} of it"
    text = (
        f"fit: gradients of single {shares.pieces}, {shares.elements} elements, condition number "
        f"{shares.condition:.3g}; unexplained: {left}"
    )
    if shares.why_not_examples:
        text += f" (not by example: {shares.why_not_examples})"
    yield from wrapped(text, "    ")


def _apart(row: ShareRow) -> bool:
    known = [value for value in row if value is not None]
    return bool(known) and max(known) - min(known) > OFF


def _share(value: float | None) -> str:
    if value is None:
        return "-"
    # Not -0.00; and what lies between two numbers, such as 0.875, is always rounded to one of them.
    return f"{0.0 if abs(value) < OFF else value + 1e-9:.2f}"
