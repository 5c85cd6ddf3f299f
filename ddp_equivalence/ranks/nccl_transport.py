"""Which way NCCL sends data between GPUs of this machine: directly, through memory, or by network.

NCCL says so only in its log.

Source: the lines that begin with "Channel" in transport/p2p.cc, shm.cc and net.cc of NCCL 2.18 to
2.29.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.lanes import missing
from ddp_equivalence.ranks.nccl_log import log_of_all_reduce

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
