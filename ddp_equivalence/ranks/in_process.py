"""A set of ranks in which rank 0 is the judging process itself, so that a debugger works there.

It serves to debug a step. In every other set each rank is a process of its own, and the judging
process never joins a process group.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ddp_equivalence.case.layouts import Layout, RankPlace
from ddp_equivalence.ranks import pickling, process_state, root_cause
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS
from ddp_equivalence.ranks.exception_text import describe_exception
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.join_group import join_group, rank_environment
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.other_ranks import OtherRanks
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.rank_0_guard import Rank0Guard
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.worker_pickling import pickled_by_value_for_workers

COLLECTIVE_TIMEOUT = 24 * 3600.0
"""Seconds that the other ranks wait in a collective while a user debugs rank 0."""

_destroyed_groups: list[object] = []
"""Groups of stopped rank sets. They are kept, as freeing one can deadlock torch 2.13."""


class InProcessRankSet(RankSet):
    """Rank 0 works in this process, without a deadline; its exceptions are not wrapped.

    The process is a member of the group only while rank 0 works. All other code here, such as the
    user's batch, finds no group, as in every process that judges.
    """

    def __init__(
        self,
        layout: Layout,
        lane: Lane,
        collective_timeout: float,
        environment: tuple[tuple[str, str], ...] | None = None,
        devices: tuple[str, ...] | None = None,
        method: str = "forkserver",
    ) -> None:
        super().__init__(layout, lane, COLLECTIVE_TIMEOUT, environment, devices, method)
        self._longest_collective = collective_timeout
        self._rank_0: Rank | None = None
        self._group: object = None
        self._rank_0_environment: dict[bytes, bytes] = {}
        self._work = b""

    def submit(self, work: bytes) -> None:
        """Send the work to the other ranks. Rank 0 begins to work when ``collect`` is called."""
        self._work = work
        super().submit(work)

    def collect(self, deadline: float) -> Iterator[tuple[int, Any]]:
        """Do the work of rank 0, while a thread collects the results of the other ranks.

        After rank 0 has finished, the others get ``deadline`` seconds. Raises RankFailed or
        RanksTimedOut if another rank fails, or has finished and rank 0 still waits for it.
        """
        others = OtherRanks(self.collect_until)
        guard = Rank0Guard(self._kill_others, others.have_finished, self._longest_collective)
        complete = False
        try:
            yield from ((0, result) for result in self._work_of_rank_0())
            guard.stop()
            yield from others.collect(deadline)
            complete = True
        except Exception as error:
            guard.stop()
            failure = self._failure(error, others, guard.broken)
            if failure is None:
                raise
            raise failure from error
        finally:
            guard.stop()
            if not complete:
                self._kill_others()
                others.wait_until_killed()

    def _work_of_rank_0(self) -> Iterator[Any]:
        _, by_value, body = pickling.split(self._work)
        outside = process_state.capture()
        process_state.set_environment({**outside.environment, **self._rank_0_environment})
        before = process_state.capture()
        try:
            # The user's modules are those of this process, so there is nothing to edit in them.
            function, argument, _ = pickling.loads(by_value, body)
            with self._in_group(), pickled_by_value_for_workers():
                yield from function(self._rank_0, argument)
            changed = process_state.restore(before)
            if changed:
                self.changed[0] = changed
        finally:
            process_state.restore(outside)

    def _failure(
        self, error: Exception, others: OtherRanks, others_killed: bool
    ) -> RankFailed | None:
        """The failure of all ranks; None if ``error`` is an exception of rank 0 alone.

        ``others_killed``: the guard has killed the other ranks, since rank 0 still waited for them
        after they had finished.
        """
        within = others.deadline.within
        if isinstance(error, RankFailed) and error.ends:  # rank 0 itself has finished
            return root_cause.failure([self.rank_end(0, "finished"), *error.ends], within)
        described = describe_exception(error)
        if not root_cause.was_left_waiting(described.what):
            return None
        of_others = others.failure()
        if of_others is None and not others_killed:
            return None
        what = described.what
        ends: Sequence[RankEnd] = of_others.ends if of_others is not None else ()
        if not ends:
            ends = [self.rank_end(row.rank, "finished") for row in self._rows_to_start()]
            seconds = f"{self._longest_collective:g} s"
            what = f"still waited {seconds} after all other ranks had finished their work"
        rank_0 = replace(
            self.rank_end(0, "exception", what),
            detail=described.traceback,
            line=described.line,
            at=described.at,
            last=described.last,
            waits=True,
        )
        return root_cause.failure([rank_0, *ends], within)

    def _kill_others(self) -> None:
        self.broken = True
        for rank in self._ranks.values():
            rank.kill()

    def stop(self) -> None:
        """Stop the other ranks, and leave the process group."""
        super().stop()
        gc.collect()  # this frees DDP objects that are part of a reference cycle
        if self._group is not None:
            _destroyed_groups.append(self._group)
            if self._is_known():  # else the user's code has ended all groups
                self._leave_group()
        self._rank_0 = self._group = None

    def _leave_group(self) -> None:
        """Leave the group that the other ranks have left by ending.

        On NCCL all ranks of a host have to call ncclCommDestroy, or it hangs; for ncclCommAbort
        those that still run are enough (NVIDIA's documentation of both).
        """
        if dist.group.WORLD is not None:  # a group of the user's own, which stays
            dist.destroy_process_group(self._group)  # type: ignore[arg-type]
            return
        with self._in_group():
            if self.lane.backend in NCCL_BACKENDS:
                dist.distributed_c10d._abort_process_group()  # private: a test fails if it changes
            else:
                dist.destroy_process_group()

    def is_alive(self) -> bool:
        """Also that the user's code has not started or ended a process group here meanwhile."""
        return super().is_alive() and dist.group.WORLD is None and self._is_known()

    def _is_known(self) -> bool:
        """True if torch still has the group. The map is private in torch; without it, it has."""
        known = getattr(dist.distributed_c10d._world, "pg_map", None)
        return known is None or self._group in known

    def _rows_to_start(self) -> Sequence[RankPlace]:
        return self.layout.rows[1:]

    def _join_group(self) -> None:
        before, outside = process_state.capture(), dist.group.WORLD
        try:
            self._rank_0 = join_group(self._start_arguments(self.layout.rows[0]), self._pass_port)
            self._rank_0_environment = rank_environment()
        finally:
            if dist.group.WORLD is not outside:
                self._group = dist.group.WORLD
            _set_world(outside)
            process_state.restore(before)
        super()._join_group()

    @contextmanager
    def _in_group(self) -> Iterator[None]:
        """In the block, the group of the ranks is this process's default group."""
        outside = dist.group.WORLD
        _set_world(self._group)
        try:
            yield
        finally:
            _set_world(outside)

    def _pass_port(self, port: int | None) -> int:
        assert port is not None  # rank 0 has opened the store
        self._send_port(port)
        return port


def _set_world(group: object) -> None:
    member: Any = dist.GroupMember
    member.WORLD = group
