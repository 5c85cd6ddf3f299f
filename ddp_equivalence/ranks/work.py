"""Does one piece of work on a rank: receives it, runs it, sends the results, cleans up after it."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection

import torch

from ddp_equivalence.ranks import messages, pickling, process_settings, process_state, workers
from ddp_equivalence.ranks.collectives import issued_in_default_group
from ddp_equivalence.ranks.exception_text import describe_exception
from ddp_equivalence.ranks.join_group import rank_environment
from ddp_equivalence.ranks.left_running import left_running
from ddp_equivalence.ranks.libraries import libraries
from ddp_equivalence.ranks.process_groups import existing_groups
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.user_modules.on_rank import ModulesOfWork

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
    libraries.begin_work()
    results: list[object] = []
    caller, by_value, body = pickling.split(work)
    _adopt_caller_state(caller)
    function, argument, edits = pickling.loads(by_value, body)
    modules = ModulesOfWork(caller.compared, caller.failed)
    modules.begin(edits)
    # Apply the settings only now: unpickling imports the step's modules, which may change them.
    before = process_state.capture()
    if not caller.settings.items() <= before.settings.items():
        process_settings.apply(caller.settings)
        before = process_state.capture()
    for result in function(rank, argument):
        if len(results) == MAX_RESULTS:
            messages.send(connection, messages.RESULTS, results)
            results = []
        results.append(result)
    del function, argument, edits
    _collect_garbage()
    kept = process_state.kept_groups()
    finished = messages.Finished(
        results=results,
        # If these differ, the rank is replaced: without its default group it could do no more work,
        # and groups that steps make would become more and more.
        same_groups=existing_groups().keys() - kept == groups.keys() - kept,
        same_modules=modules.end(),
        not_compared=modules.not_compared,
        issued=issued_in_default_group(),
        changed=process_state.restore(before),
        running=left_running(before.threads),
        libraries=libraries.imported(),
        cpu_seconds=time.process_time() - began,
    )
    flush_output()
    return finished


def flush_output() -> None:
    """Write out what Python has buffered of the output."""
    with suppress(OSError, ValueError):  # a step may have closed or replaced the streams
        sys.stdout.flush()
        sys.stderr.flush()


def _adopt_caller_state(caller: pickling.CallerState) -> None:
    """Take over environment, import path, working folder and imports of the judging process.

    The variables that make this process a rank keep their values.
    """
    process_state.set_environment(caller.environment | rank_environment())
    sys.path[:] = caller.import_path
    workers.forget_start_method()
    os.chdir(caller.working_folder)
    for name in caller.imports:
        with suppress(Exception):  # what needs the module says so itself
            import_module(name)


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
