"""Says how many rows several ranks have read, where each rank should read others.

A sampler that every rank shuffles with a seed of its own deals no partition: some rows count twice
in an epoch, and others not at all. The gradients are right all the same for the rows that were
read, so this is no difference.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import torch

from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.rows import Rows
from ddp_equivalence.report.wrapping import plural

LEAST_ELEMENTS = 3
"""Rows of fewer elements, such as labels, are too often equal by chance."""

BY_CHANCE = 4
"""Ranks share at least so many times as many rows as one of them has read twice. Of rows that are
drawn with replacement, two ranks share twice as many.
"""

MOST_ELEMENTS = 1 << 26
"""A leaf with more elements than this, on all ranks together, is not looked at."""


def read_by_several_ranks(record: Record) -> str:
    """How many rows more than one rank has read; "" if none, all, or if it is not known.

    A rank reads few equal rows itself, unless the data has some, or rows are drawn more than once.
    """
    by_rank = [_rows_of_rank(record, rank) for rank in range(record.world_size)]
    most = (0, 0)
    for path in set.intersection(*(set(one) for one in by_rank)):
        rows = [one[path] for one in by_rank]
        equal = max(len(of_rank) - len(set(of_rank)) for of_rank in rows)
        ranks_of = Counter(row for of_rank in rows for row in set(of_rank))
        shared = sum(count > 1 for count in ranks_of.values())
        if BY_CHANCE * (equal + 1) <= shared < len(ranks_of):
            most = max(most, (shared, len(ranks_of)))
    shared, distinct = most
    if not shared:
        return ""
    return (
        f"{shared} of {distinct} different rows {plural(shared, 'was', 'were')} read by more than "
        "one rank. Unless the data has equal rows, or rows are drawn with replacement, other rows "
        "are read by none"
    )


def _rows_of_rank(record: Record, rank: int) -> dict[str, list[bytes]]:
    """Digests of the rows that a rank has read in all steps, by the path of their leaf."""
    found: dict[str, list[bytes]] = {}
    for group in record.groups:
        for number in range(len(record.counts(rank, group))):
            rows = record.rows_read(rank, number, group)
            for path in rows.tensors:
                if _tells_apart(rows, path, record.world_size):
                    tensor = rows.tensors[path]
                    flat = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
                    digests = (hashlib.blake2b(row.data, digest_size=16) for row in flat.numpy())
                    found.setdefault(path, []).extend(one.digest() for one in digests)
    return found


def _tells_apart(rows: Rows, path: str, ranks: int) -> bool:
    tensor = rows.tensors[path]
    if not rows.has_rows(path) or tensor.numel() * ranks > MOST_ELEMENTS:
        return False
    return tensor[0].numel() >= LEAST_ELEMENTS
