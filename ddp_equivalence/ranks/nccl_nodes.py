"""On how many hosts NCCL believes that the ranks of a layout are.

All ranks are on one host. NCCL takes simulated nodes for hosts because of ``NCCL_HOSTID``, and this
module shows whether it does: NCCL says in its log how many nodes it has counted. Ranks of their own
run one all_reduce with the log switched on; the ranks of checks keep their environment.

Sources: NCCL_DEBUG_FILE in NVIDIA's documentation of NCCL's environment variables; the line with
"nRanks" and "nNodes" in init.cc of NCCL (2.19 to 2.29).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.lanes import choose
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.warm_ranks import warm_ranks

DEADLINE = 60.0
"""Seconds that the all_reduce may take, once the ranks have started."""

COUNTED = re.compile(r"\bnRanks (?P<ranks>\d+) nNodes (?P<nodes>\d+) localRanks")


def nodes_counted(layout: Layout, backend: str = "nccl") -> int | None:
    """The number of nodes that NCCL counts with this layout; None if its log does not say that.

    Raises RankFailed if the ranks fail, BadCase if this machine has too few GPUs.
    """
    lane = choose(layout, backend)
    with tempfile.TemporaryDirectory(prefix="ddp_equivalence-") as folder:
        log = (
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT"),
            ("NCCL_DEBUG_FILE", f"{folder}/%p.log"),
        )
        acquired = warm_ranks().acquire(
            layout, lane, DEADLINE / 2, fresh=True, extra_environment=log
        )
        with acquired as ranks:
            ranks.submit(pickling.dumps(_all_reduce, None))
            for _ in ranks.collect(DEADLINE):
                pass
        files = sorted(Path(folder).iterdir())
        lines = [
            line
            for file in files
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
    return read_nodes(lines, layout.world_size)


def read_nodes(lines: Iterable[str], world_size: int) -> int | None:
    """The number of nodes in the lines of NCCL's log about the group of all ranks.

    None if no rank wrote it, or if ranks counted different numbers.
    """
    found = [match for line in lines if (match := COUNTED.search(line))]
    nodes = {int(match["nodes"]) for match in found if int(match["ranks"]) == world_size}
    return nodes.pop() if len(nodes) == 1 else None


def _all_reduce(rank: Rank, argument: object) -> Iterator[None]:
    ones = torch.ones(1, device=rank.device)
    dist.all_reduce(ones)
    total = float(ones)
    new_collectives()  # reads this collective, which is not one of the next work
    if total != rank.world_size:
        raise RuntimeError(f"the sum of a one on each of {rank.world_size} ranks is {total:g}")
    yield None
