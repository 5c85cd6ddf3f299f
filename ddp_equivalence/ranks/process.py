"""The process of one rank: one loop that takes work, does it, and sends back what it yields."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import linecache
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.layouts import Row
from ddp_equivalence.ranks import messages
from ddp_equivalence.ranks.carry import Around
from ddp_equivalence.ranks.collectives import prove_recorder
from ddp_equivalence.ranks.environment import DEFAULTS, LOOPBACK, torchrun_environment
from ddp_equivalence.ranks.lanes import Lane, device_of
from ddp_equivalence.ranks.rank import Rank

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Birth:
    """All that a rank's process is told at its start."""

    row: Row
    lane: Lane
    visible: str
    output: Path
    stacks: Path
    collective_timeout: float


@dataclass(frozen=True)
class Raised:
    """An exception on a rank, as text: the exception itself may not travel."""

    what: str
    traceback: str
    line: str
    at: float


def main(birth: Birth, connection: Connection) -> None:
    """Join the group, then work until told to stop or until the judging process is gone."""
    _die_with_parent()
    os.setpgrp()  # Ctrl-C is for the judging process, which then ends its ranks
    _redirect_output(birth.output)
    with birth.stacks.open("a") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        try:
            rank = _join(birth, connection)
            gc.freeze()  # what is here now stays: collecting after each case then costs little
            messages.send(connection, messages.READY)
            while _work(rank, connection):
                pass
        except (EOFError, OSError):
            pass  # the judging process is gone
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # A group destroyed while a DDP object lives deadlocks in torch 2.13; the kernel
            # cleans up better.
            os._exit(0)


def _join(birth: Birth, connection: Connection) -> Rank:
    row = birth.row
    os.environ.update({k: v for k, v in DEFAULTS.items() if k not in os.environ})
    os.environ["CUDA_VISIBLE_DEVICES"] = birth.visible
    device = device_of(row.local_rank, birth.lane, birth.visible)
    timeout = timedelta(seconds=birth.collective_timeout)
    store = None
    if row.rank == 0:
        # Port 0: the system gives a free one, and nobody can take it in between.
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        messages.send(connection, messages.PORT, store.port)
    _, port = messages.receive(connection)
    torchrun = torchrun_environment(row, port)
    os.environ.update(torchrun)
    _own_names.update(torchrun, DEFAULTS, ("CUDA_VISIBLE_DEVICES",))
    if store is None:
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        birth.lane.backend,
        store=PrefixStore("ddp_equivalence", store),
        rank=row.rank,
        world_size=row.world_size,
        timeout=timeout,
    )
    prove_recorder(device)
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


def _work(rank: Rank, connection: Connection) -> bool:
    """Do one piece of work; False when told to stop."""
    kind, payload = messages.receive(connection)
    if kind == messages.STOP:
        return False
    group = _group()
    try:
        with _state_kept():
            around, work = pickle.loads(payload)
            _take_over(around)
            function, argument = pickle.loads(work)
            for result in function(rank, argument):
                messages.send(connection, messages.RESULT, result)
            del function, argument, work
    except BaseException as error:  # SystemExit too: every rank's end is accounted for
        if isinstance(error, OSError) and connection.closed:
            raise
        messages.send(connection, messages.RAISED, _raised(error))
        traceback.clear_frames(error.__traceback__)
        del error
    else:
        # A step that has destroyed or replaced the group leaves a rank that can go on no more.
        messages.send(connection, messages.FINISHED, _group() is group)
    gc.collect()  # a DDP object that lingers in a cycle would hold on to its reducer
    sys.stdout.flush()
    sys.stderr.flush()
    return True


def _group() -> object:
    return dist.group.WORLD if dist.is_initialized() else None


def _take_over(around: Around) -> None:
    """See what the judging process sees; what makes this a rank stays."""
    own = {name: value for name, value in os.environ.items() if name in _own_names}
    os.environ.clear()
    os.environ.update(around.environment | own)
    sys.path[:] = around.path
    os.chdir(around.folder)
    torch.set_default_dtype(around.default_dtype)


_own_names: set[str] = set()
"""The environment variables that make this process a rank."""


@contextmanager
def _state_kept() -> Iterator[None]:
    """Give the next case the process as this one found it."""
    environment, path, folder = dict(os.environ), list(sys.path), os.getcwd()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = torch.is_grad_enabled()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        os.chdir(folder)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_grad_enabled(gradients)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _raised(error: BaseException) -> Raised:
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
    return Raised(what, text, line, time.monotonic())


def _redirect_output(path: Path) -> None:
    """Output goes to the rank's own file, whatever pytest does with file descriptors."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    streams: tuple[Any, ...] = (os.fdopen(1, "w", 1), os.fdopen(2, "w", 1))
    sys.stdout, sys.stderr = streams


def _die_with_parent() -> None:
    """SIGKILL when the fork server goes, which goes when the judging process does (Linux).

    The server lives as long as anybody holds the other end of its pipe, and it hands that end to
    every child: a rank that kept it would keep its own parent alive.
    """
    server: Any = getattr(forkserver, "_forkserver", None)  # private: a test says if it goes
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        server._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
