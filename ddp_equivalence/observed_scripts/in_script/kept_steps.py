"""Keeps a process at the beginning of each step, which answers what is asked of the step later.

By then the script's process has gone on, and with it what the script holds in Python: a moving
mean, a counter, a generator of its own. A fork of it still has what it held at the beginning.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_equivalence.observed_scripts.query import Query, path_of_kept
from ddp_equivalence.observed_scripts.question_line import QuestionLine

MOST_KEPT = 16
"""Of more steps, only so many keep a process: each takes memory as the script goes on."""


def keep(query: Query, line: QuestionLine) -> Query | None:
    """Keep this process as it is before it computes a query. In each fork of it that computes
    something: what it is asked instead; None in the process that goes on.
    """
    path = path_of_kept(line.folder, query.steps)
    is_enough = len(list(line.folder.glob("kept*"))) >= MOST_KEPT
    if is_enough or path.exists() or not _can_be_forked():
        return None
    state, goes_on = random.getstate(), os.getpid()  # Python seeds each fork anew
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    if os.fork():
        listener.close()
        return None
    line.close()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that compute
    listener.settimeout(1.0)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if os.getppid() != goes_on and not any(line.folder.glob(f"{query.number}-*")):
                os._exit(1)  # the script has failed, and its launcher waits for all forks of it
            continue
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            random.setstate(state)
            torch.set_num_threads(1)  # a fork has no others, and would wait for them for ever
            _renew_groups()
            return line.asked_only_over(connection)
        connection.close()


def _can_be_forked() -> bool:
    """Not if it uses a GPU, or has processes that load data: these answer one process only."""
    return not torch.cuda.is_initialized() and not multiprocessing.active_children()


def _renew_groups() -> None:
    """Let the groups of one process reduce again: a fork has no threads of gloo."""
    for group in list(distributed_c10d._world.pg_map):
        if group.size() == 1 and "cpu:gloo" in str(dist.get_backend_config(group)):
            store = dist.HashStore()  # type: ignore[attr-defined]
            new = dist.ProcessGroupGloo(store, 0, 1, timedelta(minutes=5))
            kind = dist.ProcessGroup.BackendType.CUSTOM
            group._register_backend(torch.device("cpu"), kind, new)
