"""The state of a process that one case could hand on to the next: kept, compared, put back."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ddp_equivalence.ranks.process_tree import children, has_children

NOT_THE_STEPS = ("PYTEST_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "KMP_", "CUDA_HOME")
"""Beginnings of variables that others set: pytest, and torch when it is imported or compiles."""

KEPT_THREADS = ("TMonitor",)
"""Classes of threads that their libraries keep for the life of a process: tqdm's monitor."""

KEPT_BY_MODULES = ("torch._inductor.", "concurrent.futures.process")
"""Beginnings of modules whose threads stay on purpose: torch's compiler waits for its next work."""

KEPT_CHILDREN = ("multiprocessing.resource_tracker", "torch/_inductor/compile_worker")
"""Parts of command lines of processes that their libraries keep on purpose."""

WITH_PRECISION = (
    "backends",
    *(f"backends.{name}" for name in ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn")),
    *(f"backends.{name}" for name in ("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")),
)
"""Where torch keeps a precision of float32. Source: torch/backends/__init__.py."""

MOST_NAMED = 4


@dataclass(frozen=True)
class State:
    """What a process had at one moment. ``values`` are put back, ``threads`` cannot be."""

    values: Mapping[str, Any]
    environment: Mapping[bytes, bytes]
    path: tuple[str, ...]
    threads: frozenset[int | None] = field(default_factory=frozenset)


def remark(change: str) -> None:
    """Add a change that only the work itself can see to those that ``put_back`` returns."""
    _remarks.append(change)


_remarks: list[str] = []


def keep_group(group: object) -> None:
    """This process group is meant to stay for later work."""
    _kept_groups.append(group)


def kept_groups() -> frozenset[int]:
    """The ids of groups that are meant to stay."""
    return frozenset(map(id, _kept_groups))


_kept_groups: list[object] = []


def current() -> State:
    """The state now."""
    _remarks.clear()
    return State(
        values={name: read() for name, (read, _) in _VALUES.items()},
        environment=variables(),
        path=tuple(sys.path),
        threads=frozenset(one.ident for one in threading.enumerate()),
    )


def settings() -> dict[str, Any]:
    """What ranks take over from the judging process, so that both train in the same way."""
    return {name: _VALUES[name][0]() for name in TAKEN_OVER}


def take_over(settings: Mapping[str, Any]) -> None:
    """Make these settings those of this process."""
    for name, value in settings.items():
        if _VALUES[name][0]() != value:
            _VALUES[name][1](value)


def variables() -> dict[bytes, bytes]:
    """The environment variables of this process."""
    # os.environb checks every name and value each time: 0.2 ms.
    raw: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)
    return dict(raw)


def set_environment(wanted: Mapping[bytes, bytes]) -> list[bytes]:
    """Make the environment this one; the names that differed, in order."""
    now = variables()
    if now == wanted:
        return []
    names = sorted(name for name in now.keys() | wanted.keys() if now.get(name) != wanted.get(name))
    for name in names:
        if name in wanted:
            os.environb[name] = wanted[name]
        else:
            del os.environb[name]
    return names


def put_back(before: State) -> tuple[str, ...]:
    """Give the process its state of ``before``; what had changed, as phrases.

    Random numbers may have been drawn: whatever uses them is seeded anew.
    """
    changed = [*_remarks, *_environment(before), *_values(before)]
    if sys.path != list(before.path):
        sys.path[:] = before.path
    return tuple(changed)


def left_running(before: State) -> tuple[str, ...]:
    """Threads and child processes that were not there ``before``: nobody can end them cleanly."""
    threads = [
        one
        for one in threading.enumerate()
        if one.ident not in before.threads and not _is_kept(one)
    ]
    found = [f"thread {one.name!r} left running" for one in threads]
    below = children(os.getpid()) if has_children() else {}
    for pid, command in below.items():
        if not any(kept in command for kept in KEPT_CHILDREN):
            found.append(
                f"child process {pid} left running ({command[:80] or 'ended, not waited'})"
            )
    return tuple(found)


def _is_kept(thread: threading.Thread) -> bool:
    if isinstance(thread, threading._DummyThread):  # one of C++, seen because it has run Python
        return True
    target = getattr(getattr(thread, "_target", None), "__module__", None) or ""
    if target.startswith(KEPT_BY_MODULES) or type(thread).__name__ in KEPT_THREADS:
        return True
    return thread in _compilers_threads()


def _compilers_threads() -> Set[threading.Thread]:
    """Those of the pool in which torch's compiler works, if it has one yet."""
    compiler = sys.modules.get("torch._inductor.async_compile")
    pool = getattr(getattr(compiler, "AsyncCompile", None), "pool", None)
    made = getattr(pool, "cache_info", None)
    if pool is None or made is None or not made().currsize:
        return frozenset()
    return getattr(pool(), "_threads", frozenset())


def _values(before: State) -> list[str]:
    now = {name: _VALUES[name][0]() for name in before.values}
    changed = [
        f"{name} changed from {old} to {now[name]}"
        for name, old in before.values.items()
        if now[name] not in (old, "")  # "" only says that another one has changed
    ]
    if now != before.values:
        take_over(before.values)
    return changed


def _environment(before: State) -> list[str]:
    now = variables()
    names = set_environment(before.environment)
    names = [name for name in names if not os.fsdecode(name).startswith(NOT_THE_STEPS)]
    found = []
    for name in names[:MOST_NAMED]:
        old, new = before.environment.get(name), now.get(name)
        verb = "set" if old is None else "removed" if new is None else "changed"
        found.append(f"environment variable {os.fsdecode(name)} {verb}")
    if len(names) > MOST_NAMED:
        found.append(f"{len(names) - MOST_NAMED} more environment variables changed")
    return found


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(deleted)"


def _device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _set_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _precision_of_products() -> str:
    """As older code knows it; "" where torch refuses to tell, as a backend's own contradicts it."""
    try:
        known: str = torch.get_float32_matmul_precision()
    except RuntimeError:
        known = ""
    return known


def _set_precision_of_products(known: str) -> None:
    if known:
        torch.set_float32_matmul_precision(known)


def _precision_of(backend: str) -> tuple[Any, Any]:
    """How to read and write the precision of float32 of one backend and operation."""
    place = attrgetter(backend)

    def write(value: str) -> None:
        place(torch).fp32_precision = value

    return lambda: place(torch).fp32_precision, write


def _set_default_device(device: torch.device) -> None:
    # None is the CPU too, and without a mode that every call of torch goes through.
    torch.set_default_device(None if device == torch.device("cpu") else device)


_VALUES: dict[str, tuple[Any, Any]] = {
    "working folder": (_folder, os.chdir),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device, _set_default_device),
    "torch's threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's precision of float32 products": (_precision_of_products, _set_precision_of_products),
    **{f"{name}.fp32_precision": _precision_of(name) for name in WITH_PRECISION},
    "cuDNN's benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "autocast on the CPU": (
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
    ),
    "current CUDA device": (_device, _set_device),
}
"""Name -> how to read it, how to put it back."""

TAKEN_OVER = (
    "torch's default dtype",
    "torch's deterministic algorithms",
    "torch's precision of float32 products",
    *(f"{name}.fp32_precision" for name in WITH_PRECISION),
    "cuDNN's benchmark",
)
"""Of these: what a user's module sets once, at its import, in every process of a training run."""
