"""Tensors that know their device, so that mixing devices raises as on CUDA.

Such a tensor has its values in the CPU's memory, and Python sees its device. C++ sees the CPU, and
makes temporary tensors there. During backward and inside an operation these cannot be told from a
user's own, so there nothing is checked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pretended_gpus import generators, runtime

CPU = torch.device("cpu")
aten = torch.ops.aten

COPIES = {aten.copy_.default, aten._to_copy.default}
"""Operations that may read one device and write another."""

INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
"""Operations whose indices may be on the CPU."""

GRAD: Any = Tensor.grad
"""The descriptor of the attribute that C++ sets."""

INDEX_TYPES = (torch.int64, torch.int32, torch.uint8, torch.bool)


class OnGpu(Tensor):
    """A tensor on a CUDA device. ``at``: the device."""

    at: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.at

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def grad(self) -> Any:
        found = GRAD.__get__(self)
        # DDP's reducer is C++, and may put a tensor of its own here.
        return found if found is None or isinstance(found, OnGpu) else placed(found, self.at)

    @grad.setter
    def grad(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.device != self.at:
            raise RuntimeError("assigned grad has data located on a different device")
        GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        GRAD.__delete__(self)

    def get_device(self) -> int:
        return int(self.at.index)

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return moved(self, -1)

    def tolist(self) -> Any:
        return copy_to(self, -1).tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.at} device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        copy = placed(self.detach().clone(), self.at).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            copy._is_param = True
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"a tensor on {self.at} would be sent to another process")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


OnGpu.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


_thread = threading.local()
"""``inside``: True in a function of which C++ makes several operations."""


def checked_as_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which makes temporary tensors on the CPU, with a check of its arguments."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {one.at for one in tensors if isinstance(one, OnGpu)}
        if devices:
            _check(function, args, tensors, devices)
        _thread.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.inside = False

    return called


def placed(tensor: Tensor, device: torch.device) -> OnGpu:
    """The same memory as a tensor on a CUDA device."""
    made: OnGpu = Tensor._make_subclass(OnGpu, tensor, tensor.requires_grad)
    made.at = device
    return made


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {one.at for one in tensors if isinstance(one, OnGpu)}
    in_backward = torch._C._current_graph_task_id() != -1
    if func not in COPIES and not in_backward and not getattr(_thread, "inside", False):
        _check(func, args, tensors, devices)
    written = args[0] if args and isinstance(args[0], Tensor) else None
    device = written.device if func is aten.copy_.default and written is not None else None
    if device is None:
        device = min(devices, key=str)
    draws = torch.Tag.nondeterministic_seeded in func.tags and device.type == "cuda"
    with (
        torch._C._DisableTorchDispatch(),
        generators.drawing_on(device.index) if draws else nullcontext(),
    ):
        out = func(*args, **kwargs)

    def place(leaf: Any) -> Any:
        if type(leaf) is not Tensor or device.type == "cpu" or leaf is written:
            return leaf
        return placed(leaf, device)

    return pytree.tree_map(place, out)


def _check(func: Any, args: Any, tensors: list[Tensor], devices: set[torch.device]) -> None:
    """Raise what torch raises if the tensors are not all on one device."""
    first = args[0] if args else None
    others = [one for one in tensors if not isinstance(one, OnGpu) and one.dim() > 0]
    if func in INDEXING and isinstance(first, OnGpu):
        others = [one for one in others if one.dtype not in INDEX_TYPES]
    found = sorted({*map(str, devices), *("cpu" for _ in others)})
    if len(found) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(found)}! (when calling {func})"
        )


class Move(torch.autograd.Function):
    """A copy of a tensor on another device, with a gradient that is copied back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: int) -> Tensor:
        ctx.home = tensor.get_device()
        return copy_to(tensor, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy_to(gradient, ctx.home), None


def moved(tensor: Tensor, index: int) -> Tensor:
    """The tensor on a device, which is a copy unless it is there."""
    if tensor.get_device() == index:
        return tensor
    copy: Tensor = Move.apply(tensor, index)  # type: ignore[no-untyped-call]
    return copy


def copy_to(tensor: Tensor, index: int) -> Tensor:
    """A copy of the tensor on a device, without its history; index -1 is the CPU."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        copy = tensor.detach().clone()
    return copy if index < 0 else placed(copy, runtime.use(index))


def accepted_by(plain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``plain`` of ddp_equivalence, which refuses all other tensors of a type of their own."""

    def accepting(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, OnGpu) else plain(tensor)

    return accepting
