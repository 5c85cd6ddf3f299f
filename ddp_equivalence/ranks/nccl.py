"""What NCCL says of itself: its log, the hosts that it sees, and the way it sends data."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout, parse
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import Lane, missing
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.warm_ranks import warm_ranks

# What NCCL writes into its log when ranks first talk to each other.
#
# Ranks of their own run one all_reduce with the log switched on. The ranks of checks keep their
# environment.
#
# Source: NCCL_DEBUG, NCCL_DEBUG_SUBSYS and NCCL_DEBUG_FILE in the section "Environment Variables"
# of NVIDIA's NCCL documentation.

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


# On how many hosts NCCL believes that the ranks of a layout are.
#
# All ranks are on one host. NCCL takes simulated nodes for hosts because of ``NCCL_HOSTID``, and
# this module shows whether it does: NCCL says in its log how many nodes it has counted.
#
# Source: the line with "nRanks" and "nNodes" in init.cc of NCCL (2.19 to 2.29).

COUNTED = re.compile(r"\bnRanks (?P<ranks>\d+) nNodes (?P<nodes>\d+) localRanks")


def nodes_counted(layout: Layout) -> int | None:
    """The number of nodes that NCCL counts with this layout; None if its log does not say that.

    Raises RankFailed if the ranks fail.
    """
    return read_nodes(log_of_all_reduce(layout, "nccl", "INIT"), layout.world_size)


def read_nodes(lines: Iterable[str], world_size: int) -> int | None:
    """The number of nodes in the lines of NCCL's log about the group of all ranks.

    None if no rank wrote it, or if ranks counted different numbers.
    """
    found = [match for line in lines if (match := COUNTED.search(line))]
    nodes = {int(match["nodes"]) for match in found if int(match["ranks"]) == world_size}
    return nodes.pop() if len(nodes) == 1 else None


# Which way NCCL sends data between GPUs of this machine: directly, through memory, or by network.
#
# NCCL says so only in its log.
#
# Source: the lines that begin with "Channel" in transport/p2p.cc, shm.cc and net.cc of NCCL 2.18
# to 2.29.

CONNECTION = re.compile(
    r"Channel \d+(?:/\d+)? : (?P<sender>\d+)\[\w+\] -> (?P<receiver>\d+)\[\w+\]"
    r"(?: \[(?:send|receive)\])? via (?P<transport>\S+)"
)


@dataclass(frozen=True)
class Transport:
    """What NCCL chose. ``pairs``: (sender, receiver) -> names such as "P2P/CUMEM".

    ``problem``: why nothing is known, or "".
    """

    pairs: Mapping[tuple[int, int], tuple[str, ...]]
    problem: str = ""

    @property
    def counts(self) -> Counter[str]:
        """Transport -> the number of pairs that use it; the most frequent first."""
        names = Counter(name for pair in self.pairs.values() for name in pair)
        return Counter(dict(names.most_common()))


def transport(ranks: int, backend: str = "nccl") -> Transport:
    """What NCCL chooses between so many ranks on one node. Raises nothing but KeyboardInterrupt."""
    if ranks < 2:
        return Transport({}, "a single rank sends nothing")
    if reason := missing(backend, ranks):
        return Transport({}, reason)
    try:
        return read(log_of_all_reduce(parse(f"1x{ranks}"), backend, "INIT,P2P,SHM,NET"))
    except RankFailed as error:
        return Transport({}, f"the ranks of the probe failed: {_first_line(error)}")


def read(lines: Iterable[str]) -> Transport:
    """The transport that the lines of NCCL's log name."""
    pairs: dict[tuple[int, int], dict[str, None]] = {}
    for line in lines:
        if found := CONNECTION.search(line):
            pair = int(found["sender"]), int(found["receiver"])
            pairs.setdefault(pair, {})[found["transport"]] = None
    if not pairs:
        return Transport({}, "NCCL's log names no transport")
    return Transport({pair: tuple(names) for pair, names in sorted(pairs.items())})


def _first_line(error: RankFailed) -> str:
    return next(iter(str(error).splitlines()), "")
