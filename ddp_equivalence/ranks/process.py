"""A rank's process: it joins the group, works until told to stop, and cleans up after each piece
of work.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.case.layouts import RankPlace
from ddp_equivalence.ranks import messages, pickling, process_state, process_tree, sent_modules
from ddp_equivalence.ranks.backend_names import NCCL_BACKENDS, NCCL_SHARED
from ddp_equivalence.ranks.collectives import (
    LastCollective,
    check_recorder,
    issued_in_default_group,
    last_collective,
    record_sends,
    watch_handles,
)
from ddp_equivalence.ranks.environment import (
    DEFAULTS,
    LOOPBACK,
    PROCESS_GROUP_PREFIXES,
    RANK_SET_VARIABLE,
    RERUN_VARIABLE,
    nccl_defaults,
    torchrun_environment,
)
from ddp_equivalence.ranks.lanes import Lane, device_of, variables
from ddp_equivalence.ranks.messages import describe_exception
from ddp_equivalence.ranks.pickling import pickle_by_value_for_workers
from ddp_equivalence.ranks.process_state import (
    apply,
    existing_groups,
    left_running,
    libraries,
    replace_functions,
)
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.server import release_server
from ddp_equivalence.ranks.user_modules import ModulesOfWork, watch

# The main function of a rank's process: join the group, then work until told to stop.


@dataclass(frozen=True)
class Channels:
    """The rank's sides of the two pipes and two files that connect it to the judging process.

    ``work`` carries work and results, ``status`` the status thread's requests and answers. The rank
    writes everything that it prints to ``output``, and its stacks, when asked, to ``stacks``.
    """

    work: Connection
    status: Connection
    output: Connection
    stacks: Connection


def main(start: StartArguments, channels: Channels) -> None:
    """Be a rank until told to stop, or until the judging process is gone."""
    release_server()
    process_state.become_a_rank()
    process_tree.allow_workers()
    pickle_by_value_for_workers()
    process_tree.die_with_parent()
    process_tree.adopt_orphans()
    os.setpgrp()  # Ctrl-C is for the judging process, which then stops its ranks
    _redirect_output(channels.output)
    faulthandler.register(signal.SIGUSR1, file=channels.stacks.fileno(), all_threads=True)
    try:
        rank = join_group(start, lambda port: _exchange_port(port, channels.work))
        replace_functions()
        start_status_thread(channels.status)
        watch.start()
        gc.freeze()  # so that collecting garbage after each case skips the objects that exist now
        messages.send(channels.work, messages.READY)
        while do_next_work(rank, channels.work):
            pass
        # Without this Python prints a warning about semaphores that were not released.
        util._run_finalizers(0)  # type: ignore[attr-defined]
    except BaseException as error:
        with suppress(OSError):  # the judging process is gone
            messages.send(channels.work, messages.RAISED, describe_exception(error))
    finally:
        flush_output()
        # Do not destroy the process group: in torch 2.13 that deadlocks while a DDP object lives.
        # The kernel cleans up instead.
        os._exit(0)


def _exchange_port(port: int | None, connection: Connection) -> int:
    """Send the port if this is rank 0, then receive the port that the judging process passes on."""
    if port is not None:
        messages.send(connection, messages.PORT, port)
    _, agreed = messages.receive(connection)
    return int(agreed)


def _redirect_output(output: Connection) -> None:
    """Send all output to the rank's own file, whatever pytest does with file descriptors."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    streams: tuple[Any, ...] = (os.fdopen(1, "w", 1), os.fdopen(2, "w", 1))
    sys.stdout, sys.stderr = streams


# Does one piece of work on a rank: receives it, runs it, sends the results, cleans up after it.

MAX_RESULTS = 2
"""One message holds at most this many results. The results of a small model fit in one message."""


def do_next_work(rank: Rank, connection: Connection) -> bool:
    """Wait for work and do it. Returns False if the rank was told to stop instead."""
    kind, payload = messages.receive(connection)
    if kind == messages.STOP:
        return False
    try:
        messages.send(connection, messages.FINISHED, _run(rank, connection, payload))
    except BaseException as error:  # SystemExit too: every rank's end must be reported
        if isinstance(error, OSError) and connection.closed:
            raise
        flush_output()  # the output must be complete when the judging process gets the message
        messages.send(connection, messages.RAISED, describe_exception(error))
        traceback.clear_frames(error.__traceback__)
        del error
    return True


def _run(rank: Rank, connection: Connection, work: bytes) -> messages.Finished:
    """Run the work and send its results, except the last ones, which the returned message holds."""
    began = time.process_time()
    groups = existing_groups()
    libraries.of_earlier_work = tuple(sorted(libraries.imported))
    results: list[object] = []
    caller, changes, pickled = pickling.split(work)
    # The variables that make this process a rank keep their values.
    caller.adopt(rank_environment())
    process_tree.forget_start_method()
    for name in changes.imports:
        with suppress(Exception):  # what needs the module says so itself
            import_module(name)
    function, argument, edits = pickling.loads(pickled)
    modules = ModulesOfWork(changes.compared, changes.failed)
    modules.begin(edits)
    # Apply the settings only now: unpickling imports the step's modules, which may change them.
    before = process_state.capture()
    if not caller.settings.items() <= before.settings.items():
        apply(caller.settings)
        before = process_state.capture()
    with sent_modules.importable():
        for result in function(rank, argument):
            if len(results) == MAX_RESULTS:
                messages.send(connection, messages.RESULTS, results)
                results = []
            results.append(result)
    del function, argument, edits
    _collect_garbage()
    kept = process_state.kept_groups()
    # Without its default group a rank could do no more work, and groups that steps make would
    # become more and more.
    same_groups = existing_groups().keys() - kept == groups.keys() - kept
    same_modules = modules.end()
    changed, running = process_state.restore(before), left_running(before.threads)
    finished = messages.Finished(
        results=results,
        can_go_on=same_groups and same_modules and not running,
        changed=changed + running,
        not_compared=modules.not_compared,
        issued=issued_in_default_group(),
        libraries=tuple(libraries.imported),
        cpu_seconds=time.process_time() - began,
    )
    flush_output()
    return finished


def flush_output() -> None:
    """Write out what Python has buffered of the output."""
    with suppress(OSError, ValueError):  # a step may have closed or replaced the streams
        sys.stdout.flush()
        sys.stderr.flush()


def _collect_garbage() -> None:
    """Free everything that the work has left behind.

    A DDP object in a reference cycle would otherwise keep its reducer alive. Modules that the work
    has imported stay in memory anyway. They are taken out of garbage collection (``gc.freeze``),
    because walking through them after every case would take longer than the work.
    """
    global _frozen_modules
    gc.collect()
    if len(sys.modules) > _frozen_modules:
        _frozen_modules = len(sys.modules)
        gc.freeze()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # leave the memory to ranks of other layouts on the same GPU


_frozen_modules = 0


# Turns a new process into a rank: sets its environment and joins the process group.


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


# A thread on every rank that answers the judging process even while the rank's work hangs.
#
# It reports the rank's last collective. It cannot answer while something holds Python's global
# interpreter lock. Stacks do not need this thread: faulthandler writes them on a signal.

THREAD_NAME = "ddp_equivalence status"


def start_status_thread(connection: Connection) -> None:
    """On a rank: answer every request on this connection with the rank's last collective."""

    def answer() -> None:
        with suppress(EOFError, OSError):
            while True:
                connection.recv_bytes()
                connection.send_bytes(pickle.dumps(last_collective()))

    threading.Thread(target=answer, name=THREAD_NAME, daemon=True).start()


def ask(connections: Mapping[int, Connection], seconds: float) -> dict[int, LastCollective | None]:
    """In the judging process: the last collective of every rank that answers within ``seconds``.

    The value is None for a rank that answers but has recorded no collective.
    """
    waiting = {}
    for rank, connection in connections.items():
        with suppress(OSError):
            connection.send_bytes(b"?")
            waiting[connection] = rank
    answers: dict[int, LastCollective | None] = {}
    until = time.monotonic() + seconds
    while waiting and (left := until - time.monotonic()) > 0:
        for ready in wait(list(waiting), left):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            with suppress(EOFError, OSError):
                answers[rank] = pickle.loads(ready.recv_bytes())
    return answers
