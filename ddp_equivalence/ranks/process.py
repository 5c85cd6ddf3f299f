"""The process of one rank: one loop that takes work, does it, and sends back what it yields."""

from __future__ import annotations

import faulthandler
import gc
import linecache
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no stubs
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.case.layouts import RankPlace
from ddp_equivalence.ranks import messages, pickling, process_state, process_tree, status_thread
from ddp_equivalence.ranks.collectives import (
    issued_by_all,
    last_collective,
    prove_recorder,
    record_sent,
)
from ddp_equivalence.ranks.environment import (
    DEFAULTS,
    LOOPBACK,
    OF_GROUPS,
    OF_SET,
    SECOND_LOOK,
    torchrun_environment,
)
from ddp_equivalence.ranks.lanes import Lane, device_of
from ddp_equivalence.ranks.rank import Rank

HELD = 2
"""Results that wait to travel together: of a small model, all that a rank has to say."""


@dataclass(frozen=True)
class Birth:
    """All that a rank's process is told at its start.

    ``environment``: the caller's variables that shape a process group. ``start_timeout``: seconds
    to join it, ``collective_timeout``: for each collective from then on. ``token``: of the set.
    """

    row: RankPlace
    lane: Lane
    visible: str
    environment: tuple[tuple[str, str], ...]
    start_timeout: float
    collective_timeout: float
    token: str


@dataclass(frozen=True)
class Ends:
    """The rank's ends of what joins it to the judging process."""

    work: Connection
    witness: Connection
    output: Connection
    stacks: Connection


def main(birth: Birth, ends: Ends) -> None:
    """Join the group, then work until told to stop or until the judging process is gone."""
    _let_go_of_the_server()
    process_tree.die_with_parent()
    process_tree.adopt_orphans()
    os.setpgrp()  # Ctrl-C is for the judging process, which then ends its ranks
    _redirect_output(ends.output)
    faulthandler.register(signal.SIGUSR1, file=ends.stacks.fileno(), all_threads=True)
    try:
        rank = join(birth, lambda port: _agreed(port, ends.work))
        _watch_the_end_of_groups()
        status_thread.start(ends.witness)
        gc.freeze()  # what is here now stays: collecting after each case then costs little
        messages.send(ends.work, messages.READY)
        while _work(rank, ends.work):
            pass
        util._run_finalizers(0)  # type: ignore[attr-defined]  # semaphores: else Python warns
    except BaseException as error:
        with suppress(OSError):  # the judging process is gone
            messages.send(ends.work, messages.RAISED, raised(error))
    finally:
        _flush()
        # A group destroyed while a DDP object lives deadlocks in torch 2.13; the kernel
        # cleans up better.
        os._exit(0)


def join(birth: Birth, agree: Callable[[int | None], int]) -> Rank:
    """Become the rank of ``birth.row``: environment, store, process group.

    ``agree``: tells the others the store's port if this rank has opened it, and returns it.
    """
    row = birth.row
    for name in [name for name in os.environ if name.startswith(OF_GROUPS)]:
        del os.environ[name]  # the fork server's, older than the caller's
    os.environ.update(DEFAULTS | dict(birth.environment))
    os.environ |= {"CUDA_VISIBLE_DEVICES": birth.visible, OF_SET: birth.token}
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # no stubs
    device = device_of(row.local_rank, birth.lane, birth.visible)
    timeout = timedelta(seconds=birth.start_timeout)
    store = None
    if row.rank == 0:
        # Port 0: the system gives a free one, and nobody can take it in between.
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    port = agree(None if store is None else store.port)
    os.environ.update(torchrun_environment(row, port))
    own = {*torchrun_environment(row, port), *DEFAULTS, "CUDA_VISIBLE_DEVICES", OF_SET}
    _own_environment.clear()
    _own_environment.update({one: os.environb[one] for one in map(os.fsencode, own)})
    if store is None:
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if SECOND_LOOK in os.environ:
        _survive_detail()
    dist.init_process_group(
        birth.lane.backend,
        store=PrefixStore("ddp_equivalence", store),
        rank=row.rank,
        world_size=row.world_size,
        timeout=timeout,
    )
    prove_recorder(device)  # with NCCL the first collective makes the connections
    if birth.lane.backend == "gloo":
        record_sent()
    timeout = timedelta(seconds=birth.collective_timeout)
    store.set_timeout(timeout)
    dist.distributed_c10d._set_pg_timeout(timeout)  # private: a test says if it goes
    return Rank(
        rank=row.rank,
        world_size=row.world_size,
        local_rank=row.local_rank,
        local_world_size=row.local_world_size,
        node=row.node,
        nodes=row.nodes,
        device=device,
        backend=birth.lane.backend,
    )


def _watch_the_end_of_groups() -> None:
    """Remark on a group destroyed while a DDP object still holds on to it.

    Freed afterwards, such an object deadlocks the process in torch 2.13 unless somebody else holds
    the group, as a rank does here: its destructor joins a thread that needs the lock it holds.
    """
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def destroy_process_group(*arguments: Any, **named: Any) -> None:
        if any(isinstance(one, DistributedDataParallel) for one in gc.get_objects()):
            process_state.remark(
                "process group destroyed while a DistributedDataParallel was alive, which "
                "deadlocks torch 2.13 when it is freed: drop the wrapper first"
            )
        destroy(*arguments, **named)

    dist.destroy_process_group = destroy_process_group
    dist.distributed_c10d.destroy_process_group = destroy_process_group


def _survive_detail() -> None:
    """Torch 2.13 segfaults where DDP's constructor logs about a group wrapped for DETAIL.

    Seen with gloo on the CPU, in a plain script too. The log is for Meta's own fleet; without it
    the second look tells what it is there for.
    """
    logger: Any = dist.Logger  # type: ignore[attr-defined]  # no stubs
    logger.set_construction_data_and_log = lambda *_: None


def _agreed(port: int | None, connection: Connection) -> int:
    """The port that the judging process hands on from rank 0."""
    if port is not None:
        messages.send(connection, messages.PORT, port)
    _, agreed = messages.receive(connection)
    return int(agreed)


def _work(rank: Rank, connection: Connection) -> bool:
    """Do one piece of work; False when told to stop."""
    kind, payload = messages.receive(connection)
    if kind == messages.STOP:
        return False
    groups = _groups()
    results: list[object] = []
    try:
        around, apart, body = pickling.loads_around(payload)
        _take_over(around)
        function, argument = pickling.loads(apart, body)
        process_state.take_over(
            around.settings
        )  # now, as the step's modules may set others at import
        before = process_state.current()
        for result in function(rank, argument):
            if len(results) == HELD:
                messages.send(connection, messages.RESULTS, results)
                results = []
            results.append(result)
        del function, argument
        _collect_garbage()
        kept = process_state.kept_groups()
        finished = messages.Finished(
            results=results,
            # Without its group a rank can go on no more; those that it has made would add up.
            same_groups=_groups().keys() - kept == groups.keys() - kept,
            issued=issued_by_all(),
            changed=process_state.put_back(before),
            running=process_state.left_running(before),
        )
        _flush()
        messages.send(connection, messages.FINISHED, finished)
    except BaseException as error:  # SystemExit too: every rank's end is accounted for
        if isinstance(error, OSError) and connection.closed:
            raise
        _flush()  # before the word that the output is complete
        messages.send(connection, messages.RAISED, raised(error))
        traceback.clear_frames(error.__traceback__)
        del error
    return True


def _flush() -> None:
    with suppress(OSError, ValueError):  # a step may have closed or replaced them
        sys.stdout.flush()
        sys.stderr.flush()


def _collect_garbage() -> None:
    """A DDP object that lingers in a cycle would hold on to its reducer.

    Modules that the work has imported stay anyway: looking through them each time would cost more
    than the work.
    """
    global _modules
    gc.collect()
    if len(sys.modules) > _modules:
        _modules = len(sys.modules)
        gc.freeze()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # for ranks of another layout on the same GPU


_modules = 0


def _groups() -> dict[int, object]:
    """The process groups that there are, by id; held, so that no id is used again."""
    known = getattr(dist.distributed_c10d._world, "pg_map", {})  # private: else only the first
    here = (dist.group.WORLD, *known) if dist.is_initialized() else ()
    return {id(group): group for group in here}


def _take_over(around: pickling.Around) -> None:
    """See what the judging process sees; what makes this a rank stays."""
    process_state.set_environment(around.environment | _own_environment)
    sys.path[:] = around.path
    os.chdir(around.folder)


_own_environment: dict[bytes, bytes] = {}
"""The environment variables that make this process a rank."""


def own_environment() -> dict[bytes, bytes]:
    """The environment variables that make this process a rank."""
    return dict(_own_environment)


def raised(error: BaseException) -> messages.Raised:
    """The exception as text, with the innermost line outside torch."""
    text = "".join(traceback.format_exception(error))
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if f"{os.sep}torch{os.sep}" not in frame.filename
    ]
    line = ""
    if own:
        frame = own[-1]
        source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
        line = f"{frame.filename}:{frame.lineno}: {source}"
    what = "".join(traceback.format_exception_only(error)).strip()
    return messages.Raised(what, text, line, time.monotonic(), last_collective())


def _redirect_output(output: Connection) -> None:
    """Output goes to the rank's own file, whatever pytest does with file descriptors."""
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    streams: tuple[Any, ...] = (os.fdopen(1, "w", 1), os.fdopen(2, "w", 1))
    sys.stdout, sys.stderr = streams


def _let_go_of_the_server() -> None:
    """Close the end of the fork server's pipe that it hands to every child.

    The server lives as long as anybody holds it: a rank that kept it would keep its own parent
    alive, when the judging process has long gone.
    """
    server: Any = getattr(forkserver, "_forkserver", None)  # private: a test says if it goes
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        server._forkserver_alive_fd = None
