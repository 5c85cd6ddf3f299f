"""Processes of a world of two that are started by hand, some of them or all."""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no stubs

from ddp_equivalence.ranks.server import empty_main_module, start_server

NO_RANK = -1
"""As init_process_group has it by default: it asks the environment, which torchrun would set."""


def join(rank: int, port: int, seconds: float, answer: Connection) -> None:
    """What a training script does first; sends the store's port, and then what it raised, or ""."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch warns of the timeout that is meant
    timeout = timedelta(seconds=seconds)
    store = None
    if rank == NO_RANK:
        os.environ.pop("RANK", None)
    else:
        store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    answer.send(store.port if store else 0)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    except Exception as error:
        answer.send(str(error))
    else:
        answer.send("")
    answer.poll(None)  # the other one may still need this one's store


def ends_of(*ranks: int, seconds: float) -> list[str]:
    """Start these processes of a world of two: what each says."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    started: list[tuple[BaseProcess, Connection]] = []
    port = 0  # the system gives rank 0 a free one
    with empty_main_module():
        for rank in ranks:
            mine, theirs = context.Pipe()
            arguments = (rank, port, seconds, theirs)
            process: BaseProcess = context.Process(target=join, args=arguments, daemon=True)
            process.start()
            theirs.close()
            port = mine.recv()
            started.append((process, mine))
    said = [mine.recv() if mine.poll(60) else "nothing within a minute" for _, mine in started]
    for process, mine in started:
        process.kill()  # it has said all that it has to say
        process.join()
        mine.close()
    return said
