"""Finds the threads and child processes that a step has left running on its rank."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Set
from typing import Any

from ddp_equivalence.ranks import workers
from ddp_equivalence.ranks.process_tree import children, has_children, process_name

KEPT_THREAD_CLASSES = ("TMonitor",)
"""Classes of threads that a library keeps until the process ends. TMonitor is tqdm's."""

KEPT_THREAD_MODULES = (
    "torch._inductor.",
    "concurrent.futures.process",
    "multiprocessing.resource_sharer",
)
"""Prefixes of modules whose threads stay on purpose. Torch's compiler lets them wait for work, and
multiprocessing lets one wait for processes that ask for a tensor's memory."""

KEPT_CHILDREN = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Parts of the command lines of child processes that their libraries keep on purpose."""

ENDING_THREAD_MODULES = ("multiprocessing.", "concurrent.futures.")
"""Prefixes of modules whose threads end by themselves soon after the queue or pool is closed."""

ENDING_TIMEOUT = 1.0
"""Seconds that such threads, and multiprocessing's child processes, get to end."""

LOADER_WORKER = "pt_data_worker"
"""The name that torch gives to a DataLoader's worker processes."""


def current_threads() -> frozenset[int | None]:
    """The idents of all threads of this process that Python knows."""
    return frozenset(thread.ident for thread in threading.enumerate())


def left_running(threads_before: Set[int | None]) -> tuple[str, ...]:
    """The new threads, and all child processes, as phrases.

    Nothing can end them cleanly, so the caller must replace the rank. Threads and processes that
    libraries keep on purpose are left out, and so are those that are about to end.
    """
    until = time.monotonic() + ENDING_TIMEOUT
    while True:
        threads = _threads(threads_before)
        started = workers.wait_for_ended() if has_children() else []
        processes = _processes(started) if has_children() else []
        may_end = started or any(map(_may_end, threads))
        if not (threads or processes):
            workers.stop_own_server()
        if not (threads or processes) or not may_end or time.monotonic() > until:
            return (*(f"thread {thread.name!r} left running" for thread in threads), *processes)
        time.sleep(0.01)


def _threads(before: Set[int | None]) -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread.ident not in before and not _is_kept(thread)
    ]


def _processes(started: Iterable[Any]) -> list[str]:
    """All child processes, as phrases. ``started``: those that multiprocessing knows."""
    found = children(os.getpid())
    server = workers.own_server()
    if server is not None:
        del found[server]
        found |= children(server)
    names = {process.pid: process.name for process in started}
    return [
        f"child process {pid} left running ({_description(pid, command, names.get(pid))})"
        for pid, command in found.items()
        if not any(kept in command for kept in KEPT_CHILDREN)
    ]


def _description(pid: int, command: str, name: str | None) -> str:
    """``name``: the name that multiprocessing gave the process, None if it did not start it.

    The command line of a process that was forked is that of its rank, which would say nothing.
    """
    if process_name(pid) == LOADER_WORKER:
        return "a worker of a DataLoader, which lives as long as its iterator"
    if name is not None:
        return f"{name}, started with multiprocessing"
    return command[:80] or "ended, but nobody waited for it"


def _module(thread: threading.Thread) -> str:
    """The module of the function that the thread runs, or of its class if that has its own."""
    target = getattr(thread, "_target", None)
    return getattr(type(thread) if target is None else target, "__module__", None) or ""


def _may_end(thread: threading.Thread) -> bool:
    """True if the thread has returned from its function, or serves a queue or a pool."""
    has_returned = not hasattr(thread, "_target")  # threading then deletes the attribute
    return has_returned or _module(thread).startswith(ENDING_THREAD_MODULES)


def _is_kept(thread: threading.Thread) -> bool:
    # A thread that C++ code has started appears here once it has run any Python code.
    if isinstance(thread, threading._DummyThread):
        return True
    if _module(thread).startswith(KEPT_THREAD_MODULES):
        return True
    if type(thread).__name__ in KEPT_THREAD_CLASSES:
        return True
    return thread in _compiler_threads()


def _compiler_threads() -> Set[threading.Thread]:
    """The threads of the pool in which torch's compiler works, if it has made the pool already."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(compiler, "AsyncCompile", None), "pool", None)
    cache_info = getattr(pool, "cache_info", None)
    if pool is None or cache_info is None or not cache_info().currsize:
        return frozenset()
    return getattr(pool(), "_threads", frozenset())
