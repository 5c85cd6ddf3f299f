"""The state of a process that a case could hand on to the next one, and how it is restored."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence.ranks import process_tree
from ddp_equivalence.ranks.process_tree import children, has_children, process_name
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.ranks.users_line import counts_as_torch

# Captures, compares and restores the state of a process that a case could hand on to the next.

IGNORED_VARIABLES = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "CUDA_HOME",
)
"""Prefixes of variables that pytest sets, or torch when it is imported or compiles."""

MAX_VARIABLES_NAMED = 4


@dataclass(frozen=True)
class ProcessState:
    """The state of a process at one moment.

    ``settings`` (by name), ``environment`` and ``import_path`` can be restored. ``threads`` (their
    idents) cannot.
    """

    settings: Mapping[str, Any]
    environment: Mapping[bytes, bytes]
    import_path: tuple[str, ...]
    threads: frozenset[int | None]


def capture() -> ProcessState:
    """The state of this process now."""
    _reported_changes.clear()
    _changed_by_imports.clear()
    return ProcessState(
        settings=read_all(),
        environment=environment_variables(),
        import_path=tuple(sys.path),
        threads=current_threads(),
    )


def restore(before: ProcessState) -> tuple[str, ...]:
    """Give the process its earlier state and return, as phrases, everything that had changed.

    Random generators are not restored, since all code that uses them seeds them first.
    """
    now, settings_now = environment_variables(), read_all()
    differing = set_environment(before.environment)
    if settings_now != before.settings:
        apply(before.settings)
    sys.path[:] = before.import_path
    return (
        *_reported_changes,
        *_changes_of_environment(differing, before.environment, now),
        *(
            f"{name} changed from {old} to {settings_now[name]}"
            for name, old in before.settings.items()
            # "": it cannot be read now, and another setting shows why
            if settings_now[name] not in (old, "") and name not in _changed_by_imports
        ),
    )


def report_change(change: str) -> None:
    """Let the next ``restore`` return this change, which it could not find by itself."""
    _reported_changes.append(change)


_reported_changes: list[str] = []

_changed_by_imports: set[str | bytes] = set()
"""The variables (as bytes) and settings that the import of a library has changed."""


@contextmanager
def changed_by_import() -> Iterator[None]:
    """The block imports a library. What that changes is restored, and is no change of the step."""
    before: dict[Any, Any] = {**environment_variables(), **read_all()}
    try:
        yield
    finally:
        after: dict[Any, Any] = {**environment_variables(), **read_all()}
        names = before.keys() | after.keys()
        _changed_by_imports.update(name for name in names if before.get(name) != after.get(name))


def become_a_rank() -> None:
    """Note that this process is a rank and nothing else, from now on."""
    _is_a_rank.append(True)


def is_a_rank() -> bool:
    """True if this process is a rank and nothing else, and runs no other code between cases."""
    return bool(_is_a_rank)


_is_a_rank: list[bool] = []


def keep_group(group: object) -> None:
    """Keep this process group for later work: it does not count as left behind by a step."""
    _kept_groups.append(group)


def kept_groups() -> frozenset[int]:
    """The ids of the groups that were given to ``keep_group``."""
    return frozenset(map(id, _kept_groups))


_kept_groups: list[object] = []


def environment_variables() -> dict[bytes, bytes]:
    """The environment variables of this process."""
    # os.environb checks every name and value each time, which takes 0.2 ms.
    raw: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)
    return dict(raw)


def set_environment(wanted: Mapping[bytes, bytes]) -> list[bytes]:
    """Give this process exactly these variables; return the sorted names of those that differed."""
    now = environment_variables()
    if now == wanted:
        return []
    names = sorted(name for name in now.keys() | wanted.keys() if now.get(name) != wanted.get(name))
    for name in names:
        if name in wanted:
            os.environb[name] = wanted[name]
        else:
            del os.environb[name]
    return names


def _changes_of_environment(
    names: Iterable[bytes], before: Mapping[bytes, bytes], now: Mapping[bytes, bytes]
) -> Iterator[str]:
    names = [
        name
        for name in names
        if not os.fsdecode(name).startswith(IGNORED_VARIABLES) and name not in _changed_by_imports
    ]
    for name in names[:MAX_VARIABLES_NAMED]:
        verb = "set" if name not in before else "removed" if name not in now else "changed"
        yield f"environment variable {os.fsdecode(name)} {verb}"
    if len(names) > MAX_VARIABLES_NAMED:
        yield f"{len(names) - MAX_VARIABLES_NAMED} more environment variables changed"


# A rank compares them before and after its work and restores them. It also takes some of them
# over from the judging process.

PRECISION_MODULES = (
    *("backends", "backends.cuda.matmul"),
    *("backends.cudnn", "backends.cudnn.conv", "backends.cudnn.rnn"),
    *("backends.mkldnn", "backends.mkldnn.matmul", "backends.mkldnn.conv", "backends.mkldnn.rnn"),
)
"""The modules in ``torch`` that have a setting ``fp32_precision``."""


@dataclass(frozen=True)
class ProcessSetting:
    """How to read one setting and how to write it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def read_all() -> dict[str, Any]:
    """The value of every setting, by name."""
    return {name: setting.read() for name, setting in SETTINGS.items()}


@dataclass(frozen=True)
class Surroundings:
    """The state of the judging process on which imports depend, and functions that it sends.

    ``settings``: those in ``TRAINING_SETTINGS``, by name.
    """

    import_path: tuple[str, ...]
    working_folder: str
    environment: Mapping[bytes, bytes]
    settings: Mapping[str, Any]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process."""
        settings = read_training_settings()
        return cls(tuple(sys.path), os.getcwd(), environment_variables(), settings)

    def adopt(self, more: Mapping[bytes, bytes]) -> None:
        """Give this process these variables and ``more``, the import path and the folder."""
        set_environment({**self.environment, **more})
        sys.path[:] = self.import_path
        os.chdir(self.working_folder)


def read_training_settings() -> dict[str, Any]:
    """The settings in ``TRAINING_SETTINGS``, by name."""
    return {name: SETTINGS[name].read() for name in TRAINING_SETTINGS}


def apply(settings: Mapping[str, Any]) -> None:
    """Give this process these settings."""
    for name, value in settings.items():
        if SETTINGS[name].read() != value:
            SETTINGS[name].write(value)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "(deleted)"


def _start_method() -> str:
    """Multiprocessing's start method, without choosing the default one for good."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or multiprocessing.get_all_start_methods()[0]


def _set_start_method(method: str) -> None:
    default = multiprocessing.get_all_start_methods()[0]
    multiprocessing.set_start_method(None if method == default else method, force=True)


def _cuda_device() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _set_cuda_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)


def _matmul_precision() -> str:
    """The precision that torch's older function returns.

    "" if that function raises, which it does if the setting of a single backend contradicts it.
    """
    try:
        precision: str = torch.get_float32_matmul_precision()
    except RuntimeError:
        precision = ""
    return precision


def _set_matmul_precision(precision: str) -> None:
    if precision:
        torch.set_float32_matmul_precision(precision)


def _precision_of(module: str) -> ProcessSetting:
    """The float32 precision of one backend and operation."""

    def write(value: str) -> None:
        attrgetter(module)(torch).fp32_precision = value

    return ProcessSetting(partial(attrgetter(f"{module}.fp32_precision"), torch), write)


def _set_default_device(device: torch.device) -> None:
    # None means the CPU too, but does not turn on the mode that slows down every call of torch.
    torch.set_default_device(None if device == torch.device("cpu") else device)


SETTINGS: dict[str, ProcessSetting] = {
    "working folder": ProcessSetting(_working_folder, os.chdir),
    "torch's default dtype": ProcessSetting(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": ProcessSetting(torch.get_default_device, _set_default_device),
    "torch's threads": ProcessSetting(torch.get_num_threads, torch.set_num_threads),
    "torch's deterministic algorithms": ProcessSetting(
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch's grad mode": ProcessSetting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's precision of float32 products": ProcessSetting(
        _matmul_precision, _set_matmul_precision
    ),
    **{f"{name}.fp32_precision": _precision_of(name) for name in PRECISION_MODULES},
    "cuDNN's benchmark": ProcessSetting(
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "autocast on the CPU": ProcessSetting(
        lambda: torch.is_autocast_enabled("cpu"),
        lambda value: torch.set_autocast_enabled("cpu", value),
    ),
    "current CUDA device": ProcessSetting(_cuda_device, _set_cuda_device),
    "multiprocessing's start method": ProcessSetting(_start_method, _set_start_method),
}

TRAINING_SETTINGS = (
    "torch's default dtype",
    "torch's deterministic algorithms",
    "torch's precision of float32 products",
    *(f"{name}.fp32_precision" for name in PRECISION_MODULES),
    "cuDNN's benchmark",
    "multiprocessing's start method",
)
"""The settings that a user's module may change when it is imported, in every training process.

Ranks take them over from the judging process, so that they train as it would.
"""


# Which libraries for training a rank has imported: they may keep state from check to check.
#
# Accelerate, for example, keeps the precision of its first accelerator for all later ones of the
# same process. The suite cannot take back what a library keeps in its own objects; new processes
# can.

NO_LIBRARIES = frozenset({"torch", "functorch", "torchgen", "triton", "ddp_equivalence"})
"""Torch itself, whose state between checks is restored, its parts, and this package."""


@dataclass
class Libraries:
    """``imported``: the installed packages that use torch and that work on this rank has imported.

    ``of_earlier_work``: those that were imported before the present work began.
    """

    imported: set[str] = field(default_factory=set)
    of_earlier_work: tuple[str, ...] = ()

    def note(self, names: Set[str]) -> None:
        """Note those of these packages that use torch; their import has just ended."""
        wanted = names - NO_LIBRARIES
        for name, module in list(sys.modules.items()) if wanted else ():
            package = name.partition(".")[0]
            if package not in wanted or not isinstance(module, ModuleType):
                continue
            # Compared by identity: some values raise if they are compared, such as zoneinfo's.
            if any(value is torch for value in list(vars(module).values())):
                self.imported.add(package)


libraries = Libraries()
"""Those of this process, if it is a rank."""


# Finds the threads and child processes that a step has left running on its rank.

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
        started = process_tree.wait_for_ended() if has_children() else []
        processes = _processes(started) if has_children() else []
        may_end = started or any(map(_may_end, threads))
        if not (threads or processes):
            process_tree.stop_own_server()
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
    server = process_tree.own_server()
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


# In which precision a GPU multiplies float32: NVIDIA's TF32 keeps 10 bits of its mantissa.

TF32_OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""With 0 in this variable, NVIDIA's libraries never use TF32, whatever torch allows."""


def torchs_precision() -> tuple[str, str]:
    """Torch's setting for products and for convolutions, such as ``tf32`` or ``ieee``."""
    read = attrgetter("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision")
    products, convolutions = read(torch.backends)
    return products, convolutions


# Lets a step start and end the process group as a script does, though its rank has one.

FUNCTIONS = ("init_process_group", "destroy_process_group")


class _GroupOfAScript:
    """The group of a rank while a step runs, as the step sees it.

    The first ``init_process_group`` of the step keeps the group that the rank has, whatever backend
    it asks for: that of the lane is used. After ``destroy_process_group`` there is none, as far as
    the step can see, until it starts one again.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.world: Any = dist.group.WORLD
        self._groups = existing_groups()
        self._was_started = False

    def start(self, given: Mapping[str, Any]) -> str | None:
        """Start the group. None if a script would have one now, else what is wrong, or "".

        A script may not ask for another rank or number of ranks.
        """
        if self._was_started and dist.group.WORLD is not None:
            return None
        for name, own in (("rank", self._rank.rank), ("world_size", self._rank.world_size)):
            if (asked := int(given.get(name, -1))) not in (-1, own):
                return (
                    f"init_process_group({name}={asked}) on a rank that has {name} {own}: leave "
                    f"{name} out, or take it from the argument rank of the step"
                )
        self._was_started = True
        set_world(self.world)
        return ""

    def end(self, destroy: Any) -> None:
        """Hide the rank's group, and destroy those that the step has made with ``destroy``."""
        if not self._was_started:
            _report_early_destruction()
        for number, group in existing_groups().items():
            if number not in self._groups:
                destroy(group)
        set_world(None)


current_scripts: list[_GroupOfAScript] = []
"""The group of the step that runs now, if one runs. A simulated rank puts its own here."""


@contextmanager
def as_a_script_has_them(rank: Rank) -> Iterator[None]:
    """In the block, a step may call ``init_process_group`` and ``destroy_process_group``.

    It finds the group of the rank initialised at first, so that it may also do without these calls.
    Afterwards the rank has its group again.
    """
    originals = {name: getattr(dist, name) for name in FUNCTIONS}
    replace_functions()
    current_scripts.append(_GroupOfAScript(rank))
    try:
        yield
    finally:
        set_world(current_scripts.pop().world)
        for name, function in originals.items():
            _set(name, function)


def replace_functions() -> None:
    """Replace torch's two functions by ones that ask whether a step runs.

    A process that is nothing but a rank does this before it imports modules of the user, which may
    take the functions out of ``torch.distributed`` by name. Without a step they are torch's own.
    """
    if hasattr(dist.init_process_group, "__of_a_script__"):
        return
    init, destroy = (getattr(dist, name) for name in FUNCTIONS)

    @wraps(init)
    @counts_as_torch
    def init_process_group(*arguments: Any, **keywords: Any) -> None:
        # init_process_group(backend, init_method, timeout, world_size, rank, ...)
        given = dict(zip(("world_size", "rank"), arguments[3:5], strict=False)) | keywords
        wrong = current_scripts[-1].start(given) if current_scripts else None
        if wrong is None:
            init(*arguments, **keywords)  # torch says what is wrong with a second call
        elif wrong:
            raise ValueError(wrong)

    @wraps(destroy)
    @counts_as_torch
    def destroy_process_group(group: Any = None) -> None:
        world = dist.group.WORLD
        if not current_scripts or world is None or group not in (None, world):
            destroy(group)
            return
        current_scripts[-1].end(destroy)

    for name, function in zip(FUNCTIONS, (init_process_group, destroy_process_group), strict=True):
        function.__of_a_script__ = True  # type: ignore[attr-defined]
        _set(name, function)


def _set(name: str, function: Any) -> None:
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def set_world(group: object) -> None:
    """Make this group the default group of this process; None if there is to be none."""
    member: Any = dist.GroupMember
    member.WORLD = group


def existing_groups() -> dict[int, object]:
    """The process groups by ``id()``. The caller must keep them alive: ids are used again."""
    # The map of all groups is private in torch. Without it only the default group is known.
    known = getattr(dist.distributed_c10d._world, "pg_map", {})
    groups = (dist.group.WORLD, *known) if dist.is_initialized() else ()
    return {id(group): group for group in groups}


def _report_early_destruction() -> None:
    """Report a step that destroys the group it was given while a DDP object still uses it.

    In torch 2.13 such a DDP object can deadlock the process when it is freed: its destructor waits
    for a thread that needs the global interpreter lock, which the destructor holds. Ranks avoid
    this by keeping their group.
    """
    if any(isinstance(value, DistributedDataParallel) for value in gc.get_objects()):
        report_change(
            "process group destroyed while a DistributedDataParallel was alive: torch 2.13 "
            "deadlocks when that wrapper is freed later, so delete the wrapper first"
        )
