"""Tensors: wherever torch takes a device, a CUDA device is used and the CPU is meant.

In strict mode the tensors know which device was meant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import functional
from torch.utils import _device

from pretended_gpus import generators, runtime, settings

CPU = torch.device("cpu")

ALIKE = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
)
METHODS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided")
RANDOM = ("rand", "randn", "randint", "randperm")


def is_cuda(device: object) -> bool:
    """True for everything that torch would read as a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def on_host(device: Any) -> Any:
    """The CPU for a CUDA device, which gets a context; anything else as it is."""
    if not is_cuda(device):
        return device
    runtime.use(runtime.index_of(device))
    return CPU


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a CUDA device in its argument ``device`` replaced by the CPU."""
    name = getattr(function, "__name__", "")

    @wraps(function)
    def mapped(*arguments: Any, **keywords: Any) -> Any:
        device = keywords.get("device")
        if not is_cuda(device):
            made = function(*arguments, **keywords)
            on_cpu = settings.strict() and device is not None and torch.device(device) == CPU
            return made.cpu() if on_cpu else made
        index = runtime.index_of(device)
        keywords["device"] = on_host(device)
        if name in RANDOM and keywords.get("generator") is None:
            keywords["generator"] = generators.of(index)
        made = function(*arguments, **keywords)
        return _on(made, index) if settings.strict() else made

    return mapped


def _on(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """A tensor that was just made for a device, as one that is there."""
    from pretended_gpus import strict

    if isinstance(tensor, strict.OnGpu):
        return strict.moved(tensor, index)
    return strict.placed(tensor, torch.device("cuda", index))


def _to(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def to(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if arguments:
            arguments = (on_host(arguments[0]), *arguments[1:])
        if "device" in keywords:
            keywords["device"] = on_host(keywords["device"])
        return method(self, *arguments, **keywords)

    return to


def _strict_to(method: Callable[..., Any]) -> Callable[..., Any]:
    """As ``_to``, with a copy on the device."""
    from pretended_gpus import strict

    @wraps(method)
    def to(self: Any, *arguments: Any, **keywords: Any) -> Any:
        keywords.pop("non_blocking", None)
        device = keywords.pop("device", None)
        if arguments and isinstance(arguments[0], torch.Tensor):
            device, arguments = arguments[0].device, (arguments[0].dtype, *arguments[1:])
        elif arguments and (is_cuda(arguments[0]) or isinstance(arguments[0], torch.device | str)):
            device, arguments = arguments[0], arguments[1:]
        if device is None:
            return method(self, *arguments, **keywords)
        if is_cuda(device):
            out = strict.moved(self, runtime.index_of(device))
        elif torch.device(device).type == "cpu":
            out = strict.moved(self, -1)
        else:
            return method(self, device, *arguments, **keywords)
        dtypes = [one for one in arguments if isinstance(one, torch.dtype)]
        return method(out, *dtypes, **keywords) if dtypes or keywords else out

    return to


def _cuda(self: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    runtime.initialise()
    return self.to(torch.device("cuda", runtime.index_of(device)))


def install() -> None:
    """Replace the functions and methods of torch that take a device."""
    names = {
        name
        for function in _device._device_constructors()
        for name in [getattr(function, "__name__", "")]
        if getattr(torch, name, None) is function
    }
    for name in sorted(names | set(ALIKE)):
        setattr(torch, name, _mapped(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in METHODS:
        setattr(tensor, name, _mapped(getattr(tensor, name)))
    tensor.to, tensor.cuda = _strict_to(tensor.to) if settings.strict() else _to(tensor.to), _cuda
    tensor.pin_memory = lambda self, device=None: self
    if settings.strict():
        # A module that is moved keeps its parameters, which become tensors on the device.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.backends.cudnn.is_acceptable = lambda tensor: False
        from pretended_gpus import strict

        functional.scaled_dot_product_attention = strict.checked_as_one(
            functional.scaled_dot_product_attention
        )
    context: Any = _device.DeviceContext
    context.__init__ = _with_device_on_host(context.__init__)


def _with_device_on_host(make: Callable[..., None]) -> Callable[..., None]:
    """For ``with torch.device("cuda")`` and torch.set_default_device."""

    @wraps(make)
    def made(self: Any, device: Any) -> None:
        make(self, on_host(device))

    return made
