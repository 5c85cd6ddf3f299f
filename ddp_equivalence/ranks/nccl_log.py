"""What NCCL writes into its log when ranks first talk to each other.

Ranks of their own run one all_reduce with the log switched on. The ranks of checks keep their
environment.

Source: NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE in the section "Environment Variables" of
NVIDIA's NCCL documentation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.warm_ranks import warm_ranks

DEADLINE = 60.0
"""Seconds that the all_reduce may take, once the ranks have started."""

ELEMENTS = 1 << 20
"""So many elements of float32 (4 MiB) are reduced: NCCL sends less by other connections."""


def log_of_all_reduce(layout: Layout, backend: str, subsystems: str) -> list[str]:
    """The lines of NCCL's log on all ranks of the layout, one rank for each GPU.

    ``subsystems``: the value of NCCL_DEBUG_SUBSYS. Raises RankFailed if the ranks fail.
    """
    with tempfile.TemporaryDirectory(prefix="ddp_equivalence-") as folder:
        log = (
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", subsystems),
            ("NCCL_DEBUG_FILE", f"{folder}/%p.log"),
        )
        lane = Lane(backend, backend, "cuda")
        with warm_ranks().acquire(
            layout, lane, DEADLINE / 2, fresh=True, extra_environment=log
        ) as ranks:
            ranks.submit(pickling.dumps(_all_reduce, None))
            for _ in ranks.collect(DEADLINE):
                pass
        return [
            line
            for file in sorted(Path(folder).iterdir())
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        ]


def _all_reduce(rank: Rank, argument: object) -> Iterator[None]:
    values = torch.ones(ELEMENTS, device=rank.device)
    dist.all_reduce(values)
    total = float(values.sum())  # waits until the ranks have sent everything
    new_collectives()  # read these collectives now, or the next work takes them for its own
    if total != ELEMENTS * rank.world_size:
        raise RuntimeError(f"the sum of {ELEMENTS} ones on {rank.world_size} ranks is {total:g}")
    yield None
