"""The sets of ranks that are idle, and when they have to leave.

They leave for other ranks of the run: where processes or file descriptors are scarce, and where a
GPU has no room for more. The sets that were idle longest leave first.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpu_room import Lack, gpu_room, lack_of, processes_by_gpu
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.user_modules import carried
from ddp_equivalence.ranks.xdist_locks import Devices

MAX_IDLE_RANKS = 48
"""At most this many processes are kept idle. The sets that were idle longest are stopped first."""

DESCRIPTORS_PER_RANK = 6
"""File descriptors of the judging process: two pipes, two files, a sentinel, and one to spare."""

_of_the_parent: list[object] = []
"""In a fork: what belongs to the process that forked."""

Environment = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RankSetKey:
    """Cases with equal keys can use the same set of ranks.

    ``method``: how the ranks are started. ``in_process``: rank 0 is the judging process.
    """

    layout: Layout
    lane: Lane
    collective_timeout: float
    environment: Environment
    method: str
    in_process: bool = False

    def processes_on(self, devices: Devices) -> Counter[str]:
        """GPU -> the number of processes that such a set has there, on the GPUs that it was given.

        It is empty on the CPU.
        """
        return processes_by_gpu(self.layout, self.lane, devices)


class IdleSets:
    """Sets of ranks that wait for work, and the GPUs that each of them was given."""

    def __init__(self) -> None:
        self._sets: dict[tuple[RankSetKey, Devices], RankSet] = {}

    def keep(self, key: RankSetKey, devices: Devices, rank_set: RankSet) -> None:
        """Keep a set that has done its work."""
        self._sets[key, devices] = rank_set

    def take(self, key: RankSetKey, devices: Devices) -> RankSet | None:
        """Take the set out, so that it can work; None if there is none that still can."""
        rank_set = self._sets.pop((key, devices), None)
        if rank_set is None:
            return None
        outdated = rank_set.modules_version != carried.version()
        if outdated or not rank_set.is_alive():  # a rank died while it was idle
            rank_set.broken = True
            rank_set.stop()
            return None
        return rank_set

    def devices_of(self, key: RankSetKey) -> list[Devices]:
        """The GPUs of the sets that can be used for this key."""
        return [devices for idle_key, devices in self._sets if idle_key == key]

    def sets(self) -> list[RankSet]:
        """All sets, first the one that was idle longest."""
        return list(self._sets.values())

    def make_room(self, key: RankSetKey, devices: Devices) -> None:
        """Stop idle sets until there are few enough ranks with those of the new set."""
        most = min(MAX_IDLE_RANKS, _max_ranks())
        while self._sets and self._count() + key.layout.world_size > most:
            self.stop_oldest()
        if key.in_process:  # this process can be a rank of only one set at a time
            for idle_key in [idle_key for idle_key in self._sets if idle_key[0].in_process]:
                self._sets.pop(idle_key).stop()
        for gpu, processes in key.processes_on(devices).items():
            most = gpu_room().most_on(gpu)
            while (idle := self._idle_on(gpu)) and sum(idle.values()) + processes > most:
                self._sets.pop(next(iter(idle))).stop()

    def leave_gpus(self, key: RankSetKey, devices: Devices, error: RankFailed) -> bool:
        """Stop the idle sets that share GPUs with ranks for which these had no room.

        False if the ranks failed for another reason, or if there is no such set.
        """
        lack, gpus = lack_of(error), key.processes_on(devices)
        if lack is Lack.PLACE:
            for gpu in gpus:
                gpu_room().note_exclusive(gpu)
        sharing = [idle for idle in self._sets if lack and gpus & idle[0].processes_on(idle[1])]
        for idle in sharing:
            self._sets.pop(idle).stop()
        return bool(sharing)

    def leave_where(self, is_needed: Callable[[str], bool]) -> None:
        """Stop the sets on GPUs of which this is true."""
        for idle in list(self._sets):
            if any(map(is_needed, idle[0].processes_on(idle[1]))):
                self._sets.pop(idle).stop()

    def stop_oldest(self) -> bool:
        """Stop the set that was idle longest; False if there is none."""
        if not self._sets:
            return False
        self._sets.pop(next(iter(self._sets))).stop()
        return True

    def stop(self) -> None:
        """Stop all sets."""
        while self._sets:
            _, rank_set = self._sets.popitem()
            rank_set.stop()

    def forget(self) -> None:
        """Forget all sets, in a fork of the process that has started them.

        They are not freed: the process group of rank 0 in process would wait for its threads, which
        no fork has.
        """
        _of_the_parent.append(self._sets)
        self._sets = {}

    def _idle_on(self, gpu: str) -> dict[tuple[RankSetKey, Devices], int]:
        """The idle sets on this GPU, with their processes there; first that idle longest."""
        found = {idle_key: idle_key[0].processes_on(idle_key[1])[gpu] for idle_key in self._sets}
        return {idle_key: processes for idle_key, processes in found.items() if processes}

    def _count(self) -> int:
        return sum(rank_set.layout.world_size for rank_set in self._sets.values())


def _max_ranks() -> int:
    """The number of ranks for which half of this process's file descriptors suffice."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_IDLE_RANKS
    return limit // 2 // DESCRIPTORS_PER_RANK
