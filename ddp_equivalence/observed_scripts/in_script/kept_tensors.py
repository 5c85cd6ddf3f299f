"""Copies of tensors that a script may change or free afterwards."""

from __future__ import annotations

import copyreg
import hashlib
import math
import os
import random
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from types import FrameType
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ddp_equivalence.comparison.rounding import nudge_each
from ddp_equivalence.measurement.calls import CodeLine, is_users, lines_of
from ddp_equivalence.observed_scripts.queries import STATE

LARGE = 1 << 20
"""The bytes from which on a copy may lie in a file. The system takes its memory back when it needs
it, so that the copies of a large model do not have to fit into the memory beside it."""

MOST_IN_MEMORY = min(1 << 30, psutil.virtual_memory().total // 64)
"""So many bytes of a process's large copies lie in memory, which takes half the time, before files
are used. Several processes share a machine."""

_in_memory = 0
"""The bytes of the large copies that are in memory now."""


def whole(tensor: Tensor, divided_by: float = 1.0) -> Tensor:
    """A copy on the CPU: dense, without a graph; of a sharded tensor, all of it."""
    tensor = tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    tensor = tensor if gather is None else gather()
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    copy = kept(tensor.as_subclass(Tensor))  # a class of the script is not known where it is read
    return copy if divided_by == 1.0 else copy.div_(divided_by)


def put(value: Tensor | None, into: Tensor, nudge: int = 0) -> None:
    """Give a tensor of a module this value, if that has its shape. ``nudge``: as in ``Query``."""
    if value is None:
        return
    if hasattr(into, "to_local"):  # sharded, here over one process
        into = into.to_local()
    if into.shape == value.shape:
        with torch.no_grad():
            into.data.copy_(value)
            if nudge:
                nudge_each([into.data], nudge)


def kept(tensor: Tensor) -> Tensor:
    """A copy of a dense tensor on the CPU; a large one may lie in a file without a name."""
    size = tensor.numel() * tensor.element_size()
    is_large = size >= LARGE
    if is_large and _in_memory + size > MOST_IN_MEMORY:
        copy = _in_a_file(tensor, size)
        if copy is not None:
            return copy
    copy = tensor.to("cpu", copy=True)
    if is_large:
        _count(size)
        weakref.finalize(copy, _count, -size)
    return copy


def _count(size: int) -> None:
    global _in_memory
    _in_memory += size


def _in_a_file(tensor: Tensor, size: int) -> Tensor | None:
    """None if the disk has no room for it."""
    if not hasattr(os, "posix_fallocate"):
        return None
    descriptor, path = tempfile.mkstemp(prefix="observed-")
    try:
        # Without room on the disk, writing to the memory of the file would kill the process.
        os.posix_fallocate(descriptor, 0, size)
        flat = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    except OSError:
        return None
    finally:
        os.close(descriptor)
        os.unlink(path)
    return flat.view(tensor.shape).copy_(tensor)


# What a script holds in Python and in generators, and in no weight, buffer or batch.

MOST_VALUES, MOST_PARTS = 200, 20
"""Of all values, and of those in one container: the script waits while they are read."""


def held_in_python(module: nn.Module) -> dict[str, str]:
    """The states of generators, and the numbers in variables, in what objects, dicts and lists in
    variables hold, and in attributes of the module that is called: each as a text that is short.
    """
    found = dict[str, str]()
    for name, value in _values(module):
        if len(found) < MOST_VALUES and (text := _text(value)):
            found.setdefault(name, text)
    return found


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield "random", random
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy.random", numpy.random.mtrand._rand
    for name, inner in module.named_modules():
        if _is_of_users(type(inner)):
            where = f"{type(module).__name__}.{name}".rstrip(".")
            yield from _with_parts(where, inner)
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if is_users(frame.f_code.co_filename):
            for name, value in list(frame.f_locals.items()):
                yield from _with_parts(name, value)


def _with_parts(name: str, value: Any, deep: int = 3) -> Iterator[tuple[str, Any]]:
    """The value, and what it holds, down to so many levels."""
    yield name, value
    parts: Iterable[tuple[str, Any]] = ()
    if not deep:
        return
    if isinstance(value, dict):
        parts = ((f"[{k!r}]", one) for k, one in value.items() if isinstance(k, str | int))
    elif isinstance(value, list | deque):
        parts = ((f"[{k}]", one) for k, one in enumerate(value))
    elif _is_of_users(type(value)):
        attributes = getattr(value, "__dict__", {}).items()
        parts = ((f".{k}", one) for k, one in attributes if k != "_modules")  # these are named
    for part, one in islice(parts, MOST_PARTS):
        yield from _with_parts(name + part, one, deep - 1)


def _is_of_users(kind: type) -> bool:
    return is_users(_file_of(kind) or "<")


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or ""


def _text(value: Any) -> str:
    """A number, or a digest of the state of a generator; "" for anything else."""
    if isinstance(value, int | float):
        return f"{value:.6g}"
    if isinstance(value, torch.Generator):
        state: Any = value.get_state().tolist()
    elif isinstance(value, random.Random) or value is random:
        state = value.getstate()
    elif type(value).__module__.startswith("numpy.random"):
        state = getattr(value, "bit_generator", None) or value._bit_generator
        state = repr(state.state)
    else:
        return ""
    return STATE + hashlib.sha256(repr(state).encode()).hexdigest()[:8]


# Marks that tell whether a module returns the same in two processes.

MOST_ELEMENTS = 1 << 16
"""Of a larger tensor only so many elements are looked at, so that a mark takes little time."""


def mark_of(result: Any) -> float:
    """A number that tells what a module returned from nearly everything else, also from the same
    elements in another order; NaN if it returned no dense floats.
    """
    total, place = 0.0, 0
    tensors = [
        one
        for one in pytree.tree_leaves(result)
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel()
        if one.layout is torch.strided and not hasattr(one, "full_tensor")
    ]
    with _disable_current_modes(), torch.no_grad():  # nobody logs or nudges this
        for flat in (one.reshape(-1) for one in tensors):
            taken = flat[:: len(flat) // MOST_ELEMENTS + 1].double()
            places = torch.arange(place, place + len(taken), device=taken.device).double()
            total += float(taken @ torch.cos(places * places.sqrt()))
            place += len(taken)
    return total if place else math.nan


# Names for the modules that a script calls and for their tensors, whatever they are wrapped in.
#
# A script may wrap its model on several ranks and not in one process. Names do not depend on
# that.

INSIDE = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",
}
"""The class of a wrapper -> the name under which it holds what it wraps."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers around it."""
    while (name := INSIDE.get(type(module).__name__)) is not None and name in module._modules:
        inside = module._modules[name]
        if inside is None:
            break
        module = inside
    return module


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer inside a module, and every tensor that a module of the user's
    keeps as a plain attribute, by a name without wrappers; shared ones once. A view is none: FSDP
    makes such ones of its flat parameters.
    """
    seen: set[int] = set()
    yield from _named(unwrapped(module), "", seen)


def _named(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    own = () if type(module).__module__.startswith("torch.") else vars(module).items()
    kept = [(k, t) for k, t in own if isinstance(t, Tensor) and not t._is_view() and t.is_leaf]
    for name, tensor in (*module._parameters.items(), *module._buffers.items(), *kept):
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"{prefix}{name}", tensor
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            yield from _named(unwrapped(child), f"{prefix}{name}.", seen)


class ModuleNames:
    """The names of the modules that the script itself calls, in the order of their first calls:
    ``GPT``, ``Discriminator``, ``Linear`` and ``Linear#1``.
    """

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        self._parameters: dict[int, str] = {}

    def of(self, module: nn.Module) -> str:
        """The name of a module, which may be wrapped."""
        inside = unwrapped(module)
        if id(inside) not in self._names:
            kind = type(inside).__name__
            count = sum(1 for name in self.modules if name.partition("#")[0] == kind)
            name = f"{kind}#{count}" if count else kind
            self._names[id(inside)] = name
            self.modules[name] = inside  # keeps it alive, so that no other gets its id
        return self._names[id(inside)]

    def learn_parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a module that were not known before, by their full names."""
        new = []
        for inner, tensor in named_tensors(self.modules[name]):
            if isinstance(tensor, nn.Parameter) and id(tensor) not in self._parameters:
                self._parameters[id(tensor)] = f"{name}:{inner}"
                new.append((f"{name}:{inner}", tensor))
        return new

    def of_parameter(self, parameter: Tensor) -> str | None:
        """The full name of a parameter; None if it is in no module that was called."""
        return self._parameters.get(id(parameter))

    def live_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every known parameter that its module still has."""
        for module in self.modules.values():
            for _, tensor in named_tensors(module):
                name = self._parameters.get(id(tensor))
                if name is not None and isinstance(tensor, nn.Parameter):
                    yield name, tensor

    def buffers(self, modules: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """The buffers of these modules, by their full names."""
        for name in sorted(modules):
            for inner, tensor in named_tensors(self.modules[name]):
                if not isinstance(tensor, nn.Parameter):
                    yield f"{name}:{inner}", tensor


def class_that_keeps(module: nn.Module, buffer: str) -> CodeLine | None:
    """The class of the user's that keeps a buffer: its file, and its name as the function.
    ``buffer``: its name inside ``module``, with dots.
    """
    try:
        kind = type(module.get_submodule(buffer.rpartition(".")[0]))
    except AttributeError:  # it is inside a wrapper, which has no part in the name
        return None
    return CodeLine(_file_of(kind), 0, kind.__name__) if _is_of_users(kind) else None


# Lines of code in the user's own files, also where a script runs in a copy made of links.


def send_real_files() -> None:
    """From now on, a line that is sent to another process names the file that a link stands for."""

    @lru_cache(maxsize=4096)
    def real_file(file: str) -> str:
        return os.path.realpath(file) if os.path.exists(file) else file  # such as <string>

    def sent(line: CodeLine) -> tuple[type[CodeLine], tuple[Any, ...]]:
        return CodeLine, (real_file(line.file), line.number, line.function)

    copyreg.pickle(CodeLine, sent)


def place_of_caller(made: object = None) -> CodeLine | None:
    """The innermost line of the user's own code that is running. ``made``: an object that is being
    made; the lines of its own ``__init__`` do not count.
    """
    frame: FrameType | None = sys._getframe(1)
    outer = frame if made is not None else None
    while outer is not None:
        code = outer.f_code
        its_self = [outer.f_locals.get(name) for name in code.co_varnames[:1]]
        if code.co_name == "__init__" and any(one is made for one in its_self):
            frame = outer.f_back
        outer = outer.f_back
    innermost, users = lines_of(frame)
    return users or innermost
