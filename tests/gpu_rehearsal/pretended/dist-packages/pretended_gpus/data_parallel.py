"""nn.DataParallel: torch's own, with copies on the CPU in place of copies between GPUs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import scatter_gather

from pretended_gpus import runtime, settings

CPU = torch.device("cpu")


class OnDevice(Tensor):
    """A tensor on the CPU that says which device it was scattered to."""

    scattered_to = CPU

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.scattered_to

    def get_device(self) -> int:
        return self.device.index if self.device.type == "cuda" else -1


OnDevice.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def copy_to(tensor: Tensor, index: int) -> Tensor:
    """A copy of the tensor on a device; index -1 is the CPU."""
    if settings.strict():
        from pretended_gpus import strict

        return strict.copy_to(tensor, index)
    plain = tensor.as_subclass(Tensor) if isinstance(tensor, OnDevice) else tensor
    return plain.detach().clone()


def _marked(index: int, tensor: Tensor) -> Tensor:
    if settings.strict():
        return tensor
    marked: OnDevice = tensor.as_subclass(OnDevice)
    marked.scattered_to = torch.device("cuda", index)
    return marked


class Scatter(Function):
    """Parts of a tensor along one dimension, each on a device."""

    @staticmethod
    def forward(ctx: Any, gpus: Any, sizes: Any, dim: int, tensor: Tensor) -> Any:
        ctx.dim, ctx.home = dim, tensor.get_device()
        indices = [runtime.index_of(gpu) for gpu in gpus]
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(indices), dim)
        return tuple(copy_to(part, i) for part, i in zip(parts, indices, strict=False))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        joined = torch.cat([copy_to(one, ctx.home) for one in gradients], ctx.dim)
        return None, None, None, joined


class Gather(Function):
    """Tensors of several devices, one behind the other on one device."""

    @staticmethod
    def forward(ctx: Any, target: Any, dim: int, *tensors: Tensor) -> Tensor:
        index = -1 if target == "cpu" else runtime.index_of(target)
        ctx.dim, ctx.scalars = dim, all(one.dim() == 0 for one in tensors)
        ctx.devices = [one.get_device() for one in tensors]
        parts = [copy_to(one.view(1) if ctx.scalars else one, index) for one in tensors]
        ctx.sizes = [part.size(dim) for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = gradient.split(ctx.sizes, ctx.dim)
        back = [copy_to(part, i) for part, i in zip(parts, ctx.devices, strict=True)]
        return None, None, *(one[0] if ctx.scalars else one for one in back)


class Broadcast(Function):
    """Copies of tensors on several devices, whose gradients are added up."""

    @staticmethod
    def forward(ctx: Any, gpus: Any, *tensors: Tensor) -> Any:
        ctx.count, ctx.home = len(tensors), tensors[0].get_device() if tensors else -1
        copies = [copy_to(one, runtime.index_of(gpu)) for gpu in gpus for one in tensors]
        fixed = [not needed for needed in ctx.needs_input_grad[1:]] * len(gpus)
        ctx.mark_non_differentiable(
            *(copy for copy, is_fixed in zip(copies, fixed, strict=True) if is_fixed)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_gpus = [gradients[i : i + ctx.count] for i in range(0, len(gradients), ctx.count)]
        return None, *(_added(column, ctx.home) for column in zip(*of_gpus, strict=True))


def _added(gradients: Sequence[Tensor], home: int) -> Tensor:
    total, *others = [copy_to(one, home) for one in gradients]
    for other in others:
        total = total + other
    return total


def broadcast_coalesced(tensors: Sequence[Tensor], gpus: Any, buffer_size: int = 0) -> Any:
    """As torch.nn.parallel.comm.broadcast_coalesced, which copies buffers to the replicas."""
    return [[copy_to(one, runtime.index_of(gpu)) for one in tensors] for gpu in gpus]


def _scatter_kwargs(inputs: Any, keywords: Any, gpus: Any, dim: int = 0) -> Any:
    """As torch's, with each part marked with its device."""
    of_inputs, of_keywords = scatter_gather.scatter_kwargs(inputs, keywords, gpus, dim)
    if settings.strict() or len(of_inputs) == 1:
        return of_inputs, of_keywords
    from torch.utils import _pytree

    def mark(parts: Any) -> Any:
        return tuple(
            _pytree.tree_map_only(Tensor, partial(_marked, index), part)
            for part, index in zip(parts, map(runtime.index_of, gpus), strict=False)
        )

    return mark(of_inputs), mark(of_keywords)


def install() -> None:
    """Replace the copies between GPUs, and the check that the model lies on the first GPU."""
    import torch.nn.parallel._functions as functions
    from torch.nn.parallel import comm

    own: Any = sys.modules["torch.nn.parallel.data_parallel"]
    for owner in (functions, scatter_gather):
        for function in (Scatter, Gather, Broadcast):
            if hasattr(owner, function.__name__):
                setattr(owner, function.__name__, function)
    replaced: Any = comm
    replaced.broadcast_coalesced = broadcast_coalesced
    own.scatter_kwargs = _scatter_kwargs
    if settings.strict():
        return
    make = own.DataParallel.__init__

    def made(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        for index in self.device_ids:
            runtime.use(index)
        self.src_device_obj = CPU  # where the model is

    own.DataParallel.__init__ = made
