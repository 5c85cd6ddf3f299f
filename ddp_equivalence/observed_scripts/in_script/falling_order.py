"""Rows that every rank has sorted by their length stay sorted where one process has all of them.

``torch.nn.utils.rnn.pack_padded_sequence`` asks for that by default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.query import Piece
from ddp_equivalence.observed_scripts.rows import Rows


def in_falling_order(pieces: Sequence[Piece], read: Sequence[Rows]) -> Sequence[Piece]:
    """The pieces, row by row in such an order if every rank has one. ``read``: what the rank read
    in the micro-batch of each piece, with all of its rows.
    """
    lengths = _lengths(read)
    if lengths is None:
        return pieces
    alone = [
        Piece(piece.rank, piece.micro_batch, (row,))
        for piece, rows in zip(pieces, read, strict=True)
        for row in (range(rows.count) if piece.rows is None else piece.rows)
    ]
    by_piece = {(one.rank, one.micro_batch): of for one, of in zip(pieces, lengths, strict=True)}
    of_each = [int(by_piece[one.rank, one.micro_batch][one.rows[0]]) for one in alone if one.rows]
    places = sorted(range(len(alone)), key=lambda place: -of_each[place])  # equal ones stay
    return [alone[place] for place in places]


def _lengths(read: Sequence[Rows]) -> list[Tensor] | None:
    """The whole numbers that fall, or stay, from row to row in all of these; of several, those with
    the most different values, since labels may fall by chance.
    """
    found = list(_falling(read))
    return max(found, key=lambda one: len(torch.cat(one).unique())) if found else None


def _falling(read: Sequence[Rows]) -> Iterator[list[Tensor]]:
    for path in read[0].tensors:
        if not all(path in rows.tensors and rows.has_rows(path) for rows in read):
            continue
        tensors = [rows.tensors[path] for rows in read]
        if any(one.ndim != 1 or one.is_floating_point() or one.is_complex() for one in tensors):
            continue
        falls = all(bool((one[:-1] >= one[1:]).all()) for one in tensors)
        if falls and any(bool(one[0] > one[-1]) for one in tensors):
            yield tensors
