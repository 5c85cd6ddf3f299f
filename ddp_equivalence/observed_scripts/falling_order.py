"""Rows that every rank has sorted by their length stay sorted where one process has all of them.

``torch.nn.utils.rnn.pack_padded_sequence`` asks for that by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.query import Piece
from ddp_equivalence.observed_scripts.rows import Rows


def in_falling_order(pieces: Sequence[Piece], read: Sequence[Rows]) -> Sequence[Piece]:
    """The pieces, taken apart and ordered so that lengths which fall on every rank fall on.

    ``read``: what the rank read in the micro-batch of each piece, with all of its rows.
    """
    lengths = _lengths(read)
    if lengths is None:
        return pieces
    of_each: list[tuple[int, Piece, int]] = [
        (int(of_piece[row]), piece, row)
        for piece, rows, of_piece in zip(pieces, read, lengths, strict=True)
        for row in (range(rows.count) if piece.rows is None else piece.rows)
    ]
    in_order = sorted(of_each, key=lambda one: -one[0])  # equal ones stay as they are
    if in_order == of_each:
        return pieces
    found: list[Piece] = []
    for _, piece, row in in_order:
        last = found[-1] if found else None
        if last is not None and (last.rank, last.micro_batch) == (piece.rank, piece.micro_batch):
            found[-1] = replace(last, rows=(*(last.rows or ()), row))
        else:
            found.append(replace(piece, rows=(row,)))
    return found


def _lengths(read: Sequence[Rows]) -> list[Tensor] | None:
    """The whole numbers that fall, or stay, from row to row in all of these, and that begin with
    the length of another tensor of the rows: then they are lengths, and no labels.
    """
    for path in read[0].tensors:
        if not all(path in rows.tensors and rows.has_rows(path) for rows in read):
            continue
        tensors = [rows.tensors[path] for rows in read]
        if all(map(_fall, tensors)) and _are_lengths(tensors, read):
            return tensors
    return None


def _fall(numbers: Tensor) -> bool:
    if numbers.ndim != 1 or numbers.dtype not in (torch.int32, torch.int64):
        return False
    return bool((numbers[:-1] >= numbers[1:]).all()) and int(numbers[-1]) > 0


def _are_lengths(numbers: Sequence[Tensor], read: Sequence[Rows]) -> bool:
    """True if another tensor with rows is as long as the longest of them, in all of these."""
    return any(
        all(
            other in rows.tensors
            and rows.has_rows(other)
            and rows.tensors[other].ndim > 1
            and rows.tensors[other].shape[1] == int(of_rows[0])
            for of_rows, rows in zip(numbers, read, strict=True)
        )
        for other in read[0].tensors
    )
