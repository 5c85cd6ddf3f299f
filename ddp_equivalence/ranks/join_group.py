"""Turns a new process into a rank: sets its environment and joins the process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import RankPlace
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.collectives import check_recorder, record_sends
from ddp_equivalence.ranks.counted_gpus import variables
from ddp_equivalence.ranks.environment import (
    DEFAULTS,
    LOOPBACK,
    PROCESS_GROUP_PREFIXES,
    RANK_SET_VARIABLE,
    RERUN_VARIABLE,
    nccl_defaults,
    torchrun_environment,
)
from ddp_equivalence.ranks.lanes import Lane, device_of
from ddp_equivalence.ranks.missed_waits import watch_handles
from ddp_equivalence.ranks.rank import Rank


@dataclass(frozen=True)
class StartArguments:
    """Everything that the process of a rank needs to know when it starts.

    ``visible``: its CUDA_VISIBLE_DEVICES. ``environment``: the variables of the judging process
    that a process group depends on. ``start_timeout``: seconds to join the group.
    ``collective_timeout``: seconds for each collective after that. ``token``: identifies the rank
    set.
    """

    row: RankPlace
    lane: Lane
    visible: str
    environment: tuple[tuple[str, str], ...]
    start_timeout: float
    collective_timeout: float
    token: str


def join_group(start: StartArguments, exchange_port: Callable[[int | None], int]) -> Rank:
    """Make this process the rank in ``start.row`` and join the process group with the others.

    ``exchange_port`` is called on every rank and returns the port of the rendezvous store. Rank 0
    opens the store and passes its port; the other ranks pass None.
    """
    row, lane = start.row, start.lane
    _set_environment(start)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # no stubs
    device = device_of(row.local_rank, lane, start.visible)
    store = _open_store(row, lane, timedelta(seconds=start.start_timeout), exchange_port)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if RERUN_VARIABLE in os.environ:
        _skip_construction_log()
    dist.init_process_group(
        lane.backend,
        store=PrefixStore("ddp_equivalence", store),
        rank=row.rank,
        world_size=row.world_size,
        timeout=timedelta(seconds=start.start_timeout),
    )
    check_recorder(device)  # NCCL connects the ranks only now, in the first collective
    if lane.backend == "gloo":
        record_sends()
    watch_handles()
    timeout = timedelta(seconds=start.collective_timeout)
    store.set_timeout(timeout)
    dist.distributed_c10d._set_pg_timeout(timeout)  # private: a test fails if it changes
    return Rank(
        rank=row.rank,
        world_size=row.world_size,
        local_rank=row.local_rank,
        local_world_size=row.local_world_size,
        node=row.node,
        nodes=row.nodes,
        device=device,
        backend=lane.backend,
    )


def rank_environment() -> dict[bytes, bytes]:
    """The environment variables that make this process a rank."""
    return dict(_rank_environment)


_rank_environment: dict[bytes, bytes] = {}


def _set_environment(start: StartArguments) -> None:
    """Replace the fork server's variables, which may be outdated, by those of the caller."""
    for name in [name for name in os.environ if name.startswith(PROCESS_GROUP_PREFIXES)]:
        del os.environ[name]
    os.environ.update(_defaults(start.row, start.lane) | dict(start.environment))
    os.environ |= variables(start.visible) | {RANK_SET_VARIABLE: start.token}


def _defaults(row: RankPlace, lane: Lane) -> dict[str, str]:
    on_nccl = lane.backend in NCCL_BACKENDS
    return DEFAULTS | (nccl_defaults(row, lane.name == NCCL_SHARED) if on_nccl else {})


def _open_store(
    row: RankPlace, lane: Lane, timeout: timedelta, exchange_port: Callable[[int | None], int]
) -> TCPStore:
    """Set torchrun's variables and open the rendezvous store; ranks other than 0 connect to it."""
    store = None
    if row.rank == 0:
        # With port 0 the system chooses a free port and opens it at once, so that no other process
        # can take the port in between.
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = exchange_port(None if store is None else store.port)
    torchrun = torchrun_environment(row, port)
    os.environ.update(torchrun)
    names = {*torchrun, *_defaults(row, lane), *variables(""), RANK_SET_VARIABLE}
    _rank_environment.clear()
    _rank_environment.update({name: os.environb[name] for name in map(os.fsencode, names)})
    if store is None:
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    return store


def _skip_construction_log() -> None:
    """Turn off the log that DDP's constructor writes, which is only for Meta's own machines.

    A rerun sets TORCH_DISTRIBUTED_DEBUG to DETAIL. In torch 2.13 writing the log then segfaults, at
    least with gloo on the CPU. A plain script shows the same.
    """
    logger: Any = dist.Logger  # type: ignore[attr-defined]  # no stubs
    logger.set_construction_data_and_log = lambda *_: None
