"""Batches of sequences whose dim 0 is the time, and whose rows are in dim 1.

That is what ``nn.LSTM`` and ``nn.Transformer`` take unless they are told ``batch_first``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ddp_equivalence.observed_scripts.rows import Rows


def with_rows_first(rows: Rows) -> Rows:
    """The same with the rows of its tensors in dim 0; unchanged if they may not be in dim 1."""
    count = _rows_in_dim_1(rows)
    if not count:
        return rows
    swapped = frozenset(
        path for path, one in rows.tensors.items() if one.ndim > 1 and one.shape[1] == count
    )
    tensors = {
        path: one.transpose(0, 1) if path in swapped else one for path, one in rows.tensors.items()
    }
    return replace(rows, tensors=tensors, count=count, time_first=swapped)


def _rows_in_dim_1(rows: Rows) -> int:
    """How many rows there are if they are in dim 1; 0 if they are not.

    Then every tensor that has rows by its dim 0 has as many in dim 1, or in dim 0 as masks do.
    """
    shapes = [one.shape for one in rows.tensors.values() if one.ndim]
    sizes = Counter(shape[1] for shape in shapes if len(shape) > 1)
    if rows.entries or rows.lists or not sizes:
        return 0
    count = sizes.most_common(1)[0][0]
    others = [shape for shape in shapes if count not in shape[:2]]
    return 0 if any(shape[0] == rows.count for shape in others) else count
