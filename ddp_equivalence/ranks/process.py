"""The main function of a rank's process: join the group, then work until told to stop."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any

from ddp_equivalence.ranks import (
    groups_of_a_script,
    messages,
    process_state,
    process_tree,
    status_thread,
    workers,
)
from ddp_equivalence.ranks.exception_text import describe_exception
from ddp_equivalence.ranks.join_group import StartArguments, join_group
from ddp_equivalence.ranks.libraries import libraries
from ddp_equivalence.ranks.server import release_server
from ddp_equivalence.ranks.user_modules.on_rank import watch
from ddp_equivalence.ranks.work import do_next_work, flush_output
from ddp_equivalence.ranks.worker_pickling import pickle_by_value_for_workers


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
    workers.allow_workers()
    pickle_by_value_for_workers()
    process_tree.die_with_parent()
    process_tree.adopt_orphans()
    os.setpgrp()  # Ctrl-C is for the judging process, which then stops its ranks
    _redirect_output(channels.output)
    faulthandler.register(signal.SIGUSR1, file=channels.stacks.fileno(), all_threads=True)
    try:
        rank = join_group(start, lambda port: _exchange_port(port, channels.work))
        groups_of_a_script.replace_functions()
        status_thread.start(channels.status)
        watch.start()
        libraries.start()
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
