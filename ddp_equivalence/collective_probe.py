"""Do the collectives work? All-reduce with known answers, before anybody blames a loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_equivalence.ranks import Rank

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SIZES = (1, 1031)


@dataclass(frozen=True)
class Answer:
    """One collective on one rank: ``what`` was asked, and whether the answer was ``right``."""

    what: str
    right: bool


def run(rank: Rank, payload: object) -> Iterator[object]:
    """Yield an Answer for every op, dtype and size."""
    for dtype in DTYPES:
        for size in SIZES:
            for op, expected in (("sum", _sum(rank)), ("avg", _sum(rank) / rank.world_size)):
                values = torch.full((size,), rank.rank + 1.0, dtype=dtype, device=rank.device)
                dist.all_reduce(values, op=getattr(dist.ReduceOp, op.upper()))
                right = bool((values == torch.tensor(expected, dtype=dtype)).all())
                name = str(dtype).removeprefix("torch.")
                yield Answer(f"all_reduce {op} of {size} {name}", right)


def _sum(rank: Rank) -> float:
    """1 + 2 + ... + world size."""
    return rank.world_size * (rank.world_size + 1) / 2
