"""NCCL is gloo, which says that it is NCCL.

With PRETEND_DEFERRED the result of a collective is in its tensors only once somebody has waited for
it, or for the whole device: with NCCL ``wait`` orders the current stream behind NCCL's own.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.utils import _pytree as pytree

from pretended_gpus import duplicates, runtime, settings

RESULTS = {
    "all_reduce": ("tensor", 0),
    "broadcast": ("tensor", 0),
    "reduce": ("tensor", 0),
    "all_gather": ("tensor_list", 0),
    "all_gather_into_tensor": ("output_tensor", 0),
    "reduce_scatter": ("output", 0),
    "reduce_scatter_tensor": ("output", 0),
    "all_to_all_single": ("output", 0),
    "all_to_all": ("output_tensor_list", 0),
}
"""Collective -> the name and position of the argument that takes its result."""

_of_nccl: list[Any] = []
"""The process groups that were asked to use NCCL."""

_pending: list[Deferred] = []


class Deferred:
    """A collective whose result lands when it is waited for."""

    def __init__(self, work: Any, targets: list[Tensor], results: list[Tensor]) -> None:
        self._work, self._targets, self._results = work, targets, results
        _pending.append(self)

    def wait(self, timeout: Any = None) -> bool:
        if self in _pending:
            _pending.remove(self)
            self._work.wait()
            with torch.no_grad():
                for target, result in zip(self._targets, self._results, strict=True):
                    target.copy_(result)
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class ProcessGroupNCCL:
    """Stands for the class that a torch without NCCL lacks; nothing is an instance of it."""

    class Options:
        """The options of a group of NCCL, which have no effect here."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace()


def finish_all() -> None:
    """Let the results of all collectives land: somebody has waited for the device."""
    for one in list(_pending):
        one.wait()


def is_nccl(group: Any) -> bool:
    """True if the group, or the default one for None, was asked to use NCCL."""
    group = group or c10d._get_default_group()
    return any(one is group for one in _of_nccl)


def _means_nccl(backend: object) -> bool:
    return "nccl" in str(backend).lower()


def _with_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    """init_process_group or new_group, which make a group of gloo where NCCL is asked for."""

    @wraps(make)
    def made(*arguments: Any, **keywords: Any) -> Any:
        first = make.__name__ == "init_process_group"
        backend = arguments[0] if first and arguments else keywords.get("backend")
        if first:
            arguments = arguments[1:]
        nccl = _means_nccl(backend)
        if backend is None and not first:
            nccl = is_nccl(None)
        if nccl and not runtime.count():
            raise ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")
        if nccl:
            backend = "gloo"
            keywords.pop("device_id", None)
            keywords.pop("pg_options", None)
        if backend is not None:
            keywords["backend"] = backend
        group = make(*arguments, **keywords)
        if nccl:
            _of_nccl.append(c10d._get_default_group() if first else group)
            duplicates.refuse(_of_nccl[-1])
        return group

    return made


def _deferred(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    key, position = RESULTS[name]

    @wraps(call)
    def called(*arguments: Any, **keywords: Any) -> Any:
        bound = list(arguments)
        result = keywords[key] if key in keywords else bound[position]
        is_async = keywords.get("async_op", False) or (bound and bound[-1] is True)
        group = keywords.get("group")
        _check(result, group)
        if not (settings.deferred() and is_async and runtime.is_initialised() and is_nccl(group)):
            return call(*arguments, **keywords)
        targets = list(result) if isinstance(result, list | tuple) else [result]
        copies = [target.detach().clone() for target in targets]
        into: Any = copies if isinstance(result, list | tuple) else copies[0]
        if key in keywords:
            keywords[key] = into
        else:
            bound[position] = into
        return Deferred(call(*bound, **keywords), targets, copies)

    return called


def _check(result: Any, group: Any) -> None:
    """Raise what NCCL raises for a tensor that it cannot take."""
    if not is_nccl(group):
        return
    tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
    if any(one.is_sparse for one in tensors):
        raise ValueError("Tensors must be CUDA and dense")
    in_backward = torch._C._current_graph_task_id() != -1  # DDP's reducer has tensors of its own
    if settings.strict() and not in_backward and any(not one.is_cuda for one in tensors):
        raise RuntimeError("No backend type associated with device type cpu")


class _Null(dist.Work):
    """Stands for the null pointer that NCCL returns from a synchronous collective.

    Since torch 2.8 the group waits itself ("the backend has sync'ed at CPP level" in torch's
    distributed_c10d.py). Python gets None, but a dispatch mode gets an object of TorchScript, and a
    process that calls ``wait`` on it is ended: this was tried with a backend that returns null.
    """

    def wait(self, timeout: Any = None) -> bool:
        os.kill(os.getpid(), signal.SIGSEGV)
        return False


_NULL = _Null()


def _without_work(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of process groups, which returns None for a synchronous collective of NCCL."""

    def issue(group: Any, *arguments: Any, **keywords: Any) -> Any:
        work = method(group, *arguments, **keywords)
        if work is _NULL:
            return None
        is_async = all(getattr(one, "asyncOp", True) for one in (*arguments, *keywords.values()))
        if is_async or not is_nccl(group):
            return work
        _wait(work)
        return None

    return issue


_wait = dist.Work.wait
"""Torch's own, of which nobody is told: NCCL waits in C++."""


def _with_null(call: Callable[..., Any]) -> Callable[..., Any]:
    """An operation as dispatch modes call it: null is the Work of a synchronous one on NCCL."""

    @wraps(call)
    def called(operation: Any, /, *arguments: Any, **keywords: Any) -> Any:
        result = call(operation, *arguments, **keywords)
        if operation.namespace != "c10d":
            return result
        names = [argument.name for argument in operation._schema.arguments]
        given = dict(zip(names, arguments, strict=False)) | keywords
        if given.get("async_op", True) or not is_nccl(_unbox_group(given["process_group"])):
            return result
        *results, work = result if isinstance(result, list | tuple) else [result]
        work.wait()
        return (*results, _NULL.boxed()) if results else _NULL.boxed()

    return called


_unbox_group: Callable[[Any], Any] = dist.ProcessGroup.unbox
_unbox_work: Callable[[Any], Any] = dist.Work.unbox


def _unbox(boxed: Any) -> Any:
    work = _unbox_work(boxed)
    return None if work is _NULL else work


def _barrier(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(*arguments: Any, **keywords: Any) -> Any:
        keywords.pop("device_ids", None)
        return call(*arguments, **keywords)

    return called


def _backend_of(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def called(group: Any = None) -> Any:
        return "nccl" if is_nccl(group) else call(group)

    return called


def install() -> None:
    """Replace the functions that make process groups, and collectives that give a handle."""
    available = dist.is_backend_available
    if not hasattr(c10d, "ProcessGroupNCCL"):
        _replace("ProcessGroupNCCL", ProcessGroupNCCL)
    _replace("is_nccl_available", lambda: True)
    _replace("is_backend_available", lambda backend: backend == "nccl" or available(backend))
    _replace("init_process_group", _with_gloo(c10d.init_process_group))
    _replace("new_group", _with_gloo(c10d.new_group))
    _replace("get_backend", _backend_of(c10d.get_backend))
    _replace("barrier", _barrier(c10d.barrier))
    if settings.strict():
        of_objects = c10d._get_object_coll_device
        _replace(
            "_get_object_coll_device",
            lambda group=None: "cuda" if is_nccl(group) else of_objects(group),
        )
    for name in RESULTS:
        _replace(name, _deferred(name, getattr(c10d, name)))
    for name, method in list(vars(dist.ProcessGroup).items()):
        if re.search(r"-> \S*Work$", method.__doc__ or "", re.MULTILINE):
            setattr(dist.ProcessGroup, name, _without_work(method))
    work: Any = dist.Work
    work.unbox = staticmethod(_unbox)
    operation: Any = type(torch.ops.c10d.allreduce_.default)
    operation.__call__ = _with_null(operation.__call__)


def _replace(name: str, function: Any) -> None:
    setattr(c10d, name, function)
    setattr(dist, name, function)
