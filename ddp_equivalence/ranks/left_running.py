"""Finds the threads and child processes that a step has left running on its rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Set

from ddp_equivalence.ranks.process_tree import children, has_children

KEPT_THREAD_CLASSES = ("TMonitor",)
"""Classes of threads that a library keeps until the process ends. TMonitor is tqdm's."""

KEPT_THREAD_MODULES = ("torch._inductor.", "concurrent.futures.process")
"""Prefixes of modules whose threads stay on purpose: torch's compiler lets them wait for work."""

KEPT_CHILDREN = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Parts of the command lines of child processes that their libraries keep on purpose."""


def current_threads() -> frozenset[int | None]:
    """The idents of all threads of this process that Python knows."""
    return frozenset(thread.ident for thread in threading.enumerate())


def left_running(threads_before: Set[int | None]) -> tuple[str, ...]:
    """The new threads, and all child processes, as phrases.

    Nothing can end them cleanly, so the caller must replace the rank. Threads and processes that
    libraries keep on purpose are left out.
    """
    threads = [
        f"thread {thread.name!r} left running"
        for thread in threading.enumerate()
        if thread.ident not in threads_before and not _is_kept(thread)
    ]
    processes = [
        f"child process {pid} left running ({command[:80] or 'ended, but nobody waited for it'})"
        for pid, command in (children(os.getpid()) if has_children() else {}).items()
        if not any(kept in command for kept in KEPT_CHILDREN)
    ]
    return (*threads, *processes)


def _is_kept(thread: threading.Thread) -> bool:
    # A thread that C++ code has started appears here once it has run any Python code.
    if isinstance(thread, threading._DummyThread):
        return True
    module = getattr(getattr(thread, "_target", None), "__module__", None) or ""
    if module.startswith(KEPT_THREAD_MODULES) or type(thread).__name__ in KEPT_THREAD_CLASSES:
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
