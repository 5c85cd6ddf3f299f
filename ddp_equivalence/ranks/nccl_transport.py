"""Which way NCCL sends data between GPUs of this machine: directly, through memory, or by network.

NCCL says so only in its log, when ranks first talk to each other. So ranks of their own run one
all_reduce with the log switched on. The ranks of checks keep their environment.

Sources: NCCL_DEBUG_FILE in the section "Environment Variables" of NVIDIA's NCCL documentation, and
the lines that begin with "Channel" in transport/p2p.cc, shm.cc and net.cc of NCCL 2.18 to 2.29.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks import pickling
from ddp_equivalence.ranks.collectives import new_collectives
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import Lane, missing
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.warm_ranks import warm_ranks

DEADLINE = 60.0
"""Seconds that the all_reduce may take, once the ranks have started."""

ELEMENTS = 1 << 20
"""So many elements of float32 (4 MiB) are reduced: NCCL sends less by other connections."""

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
    with tempfile.TemporaryDirectory(prefix="ddp_equivalence-") as folder:
        log = (
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT,P2P,SHM,NET"),
            ("NCCL_DEBUG_FILE", f"{folder}/%p.log"),
        )
        layout, lane = parse(f"1x{ranks}"), Lane(backend, backend, "cuda")
        try:
            with warm_ranks().acquire(
                layout, lane, DEADLINE / 2, fresh=True, extra_environment=log
            ) as rank_set:
                rank_set.submit(pickling.dumps(_all_reduce, None))
                for _ in rank_set.collect(DEADLINE):
                    pass
        except RankFailed as error:
            return Transport({}, f"the ranks of the probe failed: {_first_line(error)}")
        return read(_lines(Path(folder)))


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


def _all_reduce(rank: Rank, argument: object) -> Iterator[None]:
    values = torch.ones(ELEMENTS, device=rank.device)
    dist.all_reduce(values)
    total = float(values.sum())  # waits until the ranks have sent everything
    new_collectives()  # read these collectives now, or the next work takes them for its own
    if total != ELEMENTS * rank.world_size:
        raise RuntimeError(f"the sum of {ELEMENTS} ones on {rank.world_size} ranks is {total:g}")
    yield None


def _lines(folder: Path) -> Iterator[str]:
    for file in sorted(folder.iterdir()):
        yield from file.read_text(encoding="utf-8", errors="replace").splitlines()


def _first_line(error: RankFailed) -> str:
    return next(iter(str(error).splitlines()), "")
