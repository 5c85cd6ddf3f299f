"""Where a tensor has the entries of each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.observed_scripts.query import RowOrder


@dataclass(frozen=True)
class RowsInTensor:
    """``dim``: in which the rows follow one another. ``each``: so many entries of it belong to each
    row. ``in_blocks``: the first entries of all rows come first, and then the second ones;
    otherwise those of one row stand together.
    """

    dim: int
    each: int
    in_blocks: bool

    @classmethod
    def of(cls, shape: Sequence[int], rows: int, row_order: RowOrder) -> RowsInTensor | None:
        """Where a tensor of this shape has so many rows; None if it has none.

        A sequence model may have the time in dim 0 and the batch in dim 1, and numbers may belong
        to no row. The length of a dimension may be a multiple of the number of rows by chance:
        ``row_order`` says what is meant.
        """
        if not rows or not len(shape) or row_order == "no rows":
            return None
        if row_order == "in dim 1" and len(shape) > 2 and shape[1] == rows:
            return cls(1, 1, False)
        if not shape[0] or shape[0] % rows:
            return None
        return cls(0, shape[0] // rows, row_order == "in blocks")

    def by_row(self, tensor: Tensor) -> Tensor:
        """The same with the rows in dim 0, and the entries of a row in dim 1."""
        rows_first = tensor.movedim(self.dim, 0)
        rest = rows_first.shape[1:]
        if self.in_blocks:
            return rows_first.reshape(self.each, -1, *rest).transpose(0, 1)
        return rows_first.reshape(-1, self.each, *rest)

    def back(self, by_row: Tensor) -> Tensor:
        """The tensor of which this is what ``by_row`` returns."""
        entries = by_row.transpose(0, 1) if self.in_blocks else by_row
        return entries.reshape(-1, *by_row.shape[2:]).movedim(0, self.dim)

    def shape(self, shape: Sequence[int], rows: int) -> list[int]:
        """The shape of a tensor that has so many rows, and is like one of this shape otherwise."""
        return [rows * self.each if dim == self.dim else size for dim, size in enumerate(shape)]

    def empty(self, tensor: Tensor, rows: int) -> Tensor:
        """A tensor of so many rows whose dimensions lie in memory as those of the other tensor do:
        random numbers are drawn in the order of the memory.
        """
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
        shape = self.shape(tensor.shape, rows)
        empty = tensor.new_empty([shape[dim] for dim in order])
        return empty.permute([order.index(dim) for dim in range(tensor.ndim)])

    def with_rows(self, tensor: Tensor, count: int, rows: Sequence[int]) -> Tensor:
        """A tensor of ``count`` rows, in which those with these numbers are those of ``tensor``.

        The others are 1, which is right as a probability and as a weight.
        """
        whole = self.empty(tensor, count)
        by_row = self.by_row(torch.ones_like(whole))
        taken = torch.tensor(rows, dtype=torch.long, device=tensor.device)
        return whole.copy_(self.back(by_row.index_copy(0, taken, self.by_row(tensor))))

    def rows_of(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """The rows with these numbers."""
        taken = torch.tensor(rows, dtype=torch.long, device=tensor.device)
        return self.back(self.by_row(tensor).index_select(0, taken))

    def split(self, tensor: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """The first rows, the next ones, and so on."""
        return [self.back(part) for part in self.by_row(tensor).split(list(counts))]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows of all of them."""
        return self.back(torch.cat([self.by_row(part) for part in parts]))
