"""How one process takes the micro-batches that several ranks have read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from ddp_equivalence.observed_scripts.falling_order import in_falling_order
from ddp_equivalence.observed_scripts.query import Piece
from ddp_equivalence.observed_scripts.record import Record, Row, pieces_of

SIDE_BY_SIDE, ONE_AFTER_THE_OTHER, AT_ONCE = "side by side", "one after the other", "at once"
JOINED_AND_REPEATED = "joined and repeated"

Arrangement = str
"""How one process takes the micro-batches of several ranks: each joined with those of the other
ranks; one after the other, if the script divides its micro-batches among the ranks; or all at once,
without accumulation.

If the ranks' micro-batches have different numbers of rows, a script that divides them among the
ranks gets them joined, each several times: one after the other they would count equally, as they do
on the ranks, where one process has equal ones.
"""


def arranged(
    record: Record, arrangement: Arrangement, group: tuple[int, ...], rows: Sequence[Row]
) -> tuple[tuple[Piece, ...], ...]:
    """The micro-batches in which the script is given these rows of a group of steps."""
    counts = {
        (rank, number): count
        for rank in range(record.world_size)
        for number, count in enumerate(record.counts(rank, group))
    }
    arrangement = arrangement_of(record, arrangement, group)
    left_out, each = record.left_out(group), most_micro_batches(record, group)
    if left_out and len(rows) == len(record.rows(group)):
        rows = (*rows, *record.rows(group, left_out))  # the script leaves them out again
    else:
        each -= len(left_out)
    units: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        one_by_one = row.micro_batch, row.rank
        unit = {ONE_AFTER_THE_OTHER: one_by_one, AT_ONCE: 0}.get(arrangement, row.micro_batch)
        units[unit].append(row)
    wanted = {SIDE_BY_SIDE: each, AT_ONCE: 1}.get(arrangement, each * record.world_size)
    taken = [pieces_of(of_unit, counts) for _, of_unit in sorted(units.items(), key=_in_order)]
    if wanted % len(taken):
        taken = [pieces_of(rows, counts)]
    return tuple(taken * (wanted // len(taken)))


def order_of(
    record: Record, arrangement: Arrangement, group: tuple[int, ...], rows: Sequence[Row]
) -> list[int]:
    """The numbers of these rows in the order in which the script is given them."""
    numbers: dict[tuple[int, int], dict[int | None, int]] = defaultdict(dict)
    for number, row in enumerate(rows):
        numbers[row.rank, row.micro_batch][row.row] = number
    order: list[int] = []
    for piece in chain.from_iterable(
        _as_given(record, group, pieces) for pieces in arranged(record, arrangement, group, rows)
    ):
        known = numbers[piece.rank, piece.micro_batch]
        order += known.values() if piece.rows is None else [known[row] for row in piece.rows]
    return order


def _as_given(record: Record, group: tuple[int, ...], pieces: tuple[Piece, ...]) -> Sequence[Piece]:
    """The pieces of a micro-batch as the script is given them."""
    if record.feed != "loader":
        return pieces
    read = [record.rows_read(one.rank, one.micro_batch, group) for one in pieces]
    return in_falling_order(pieces, read)


def arrangement_of(record: Record, arrangement: Arrangement, group: tuple[int, ...]) -> Arrangement:
    """The arrangement for a group of steps."""
    if arrangement != ONE_AFTER_THE_OTHER:
        return arrangement
    counts = {count for rank in range(record.world_size) for count in record.counts(rank, group)}
    return ONE_AFTER_THE_OTHER if len(counts) == 1 else JOINED_AND_REPEATED


def most_micro_batches(record: Record, group: tuple[int, ...]) -> int:
    """How many micro-batches the rank has that has most."""
    return max(len(record.counts(rank, group)) for rank in range(record.world_size))


def _in_order(item: tuple[object, object]) -> tuple[int, ...]:
    """Micro-batches in their order, and in each the ranks in theirs."""
    key = item[0]
    return key if isinstance(key, tuple) else (int(key),)  # type: ignore[call-overload]
