"""Digests of the examples that a rank is given, by leaf: do all processes build one batch?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_equivalence.case.batch_tree import hidden_tensors, leaves_of
from ddp_equivalence.case.case import Case
from ddp_equivalence.case.given import given_to
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.comparison.digest import digest

SIMPLE = (str, bytes, int, float, complex, type(None), np.generic)
"""Leaves whose text says everything about them. Objects of other types are not digested."""

Digests = Mapping[str, str]
"""Path of a leaf -> digest of its examples."""


def digest_leaves(batches: Sequence[Any]) -> Digests:
    """The digest of every leaf, over all these batches; empty for an object that has no digest."""
    texts: dict[str, list[str]] = {}
    for batch in batches:
        simple: dict[str, list[str]] = {}
        for path, leaf in leaves_of(batch):
            if isinstance(leaf, Tensor):
                described = f"{leaf.dtype} {tuple(leaf.shape)} "
                texts.setdefault(path, []).append(digest(iter([(described, leaf)])))
            elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
                described = f"{leaf.dtype} {leaf.shape} "
                data = torch.frombuffer(bytearray(leaf.tobytes() + b"\0"), dtype=torch.uint8)
                texts.setdefault(path, []).append(digest(iter([(described, data)])))
            elif isinstance(leaf, SIMPLE):
                # A list of names has a leaf for every example. They get one digest together.
                simple.setdefault(path.rpartition("[")[0] or path, []).append(repr(leaf))
            else:
                hidden = sorted(digest(iter([("", one)])) for one in hidden_tensors(leaf))
                texts.setdefault(path, []).extend(hidden)
        for path, entries in simple.items():
            texts.setdefault(path, []).append(digest(iter([(", ".join(entries), None)])))
    return {path: " ".join(parts) for path, parts in texts.items()}


@dataclass(frozen=True)
class DataByRank:
    """The digests of what every rank must be given, and how the ranks are given it."""

    by_rank: tuple[Digests, ...]
    undivided: bool
    together: bool

    def of_batch(self, case: Case, whole: Any, sizes: Sequence[int]) -> DataByRank:
        """The same for another batch of the case."""
        return data_by_rank(case, whole, sizes, undivided=self.undivided, together=self.together)


def data_by_rank(
    case: Case, whole: Any, sizes: Sequence[int], *, undivided: bool, together: bool
) -> DataByRank:
    """What the ranks' digests are if they build this batch. Arguments: those of ``given_to``."""
    ranks = case.ranks.world_size
    undivided = undivided or case.shards == OWN
    given = (
        given_to(rank, case, whole, sizes, undivided=undivided, together=together)
        for rank in range(1 if undivided else ranks)
    )
    digests = tuple(map(digest_leaves, given))
    return DataByRank(digests * ranks if undivided else digests, undivided, together)


def differing_leaf(one: Digests, other: Digests) -> str | None:
    """The path of the first leaf that differs; None if all are the same."""
    paths = [*one, *(path for path in other if path not in one)]
    return next((path or "batch" for path in paths if one.get(path) != other.get(path)), None)
