"""On how many hosts NCCL believes that the ranks of a layout are.

All ranks are on one host. NCCL takes simulated nodes for hosts because of ``NCCL_HOSTID``, and this
module shows whether it does: NCCL says in its log how many nodes it has counted.

Source: the line with "nRanks" and "nNodes" in init.cc of NCCL (2.19 to 2.29).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.nccl_log import log_of_all_reduce

COUNTED = re.compile(r"\bnRanks (?P<ranks>\d+) nNodes (?P<nodes>\d+) localRanks")


def nodes_counted(layout: Layout, backend: str = "nccl") -> int | None:
    """The number of nodes that NCCL counts with this layout; None if its log does not say that.

    Raises RankFailed if the ranks fail.
    """
    return read_nodes(log_of_all_reduce(layout, backend, "INIT"), layout.world_size)


def read_nodes(lines: Iterable[str], world_size: int) -> int | None:
    """The number of nodes in the lines of NCCL's log about the group of all ranks.

    None if no rank wrote it, or if ranks counted different numbers.
    """
    found = [match for line in lines if (match := COUNTED.search(line))]
    nodes = {int(match["nodes"]) for match in found if int(match["ranks"]) == world_size}
    return nodes.pop() if len(nodes) == 1 else None
