"""Tensors: wherever torch takes a device, a CUDA device is used and the CPU is meant."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
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
            return function(*arguments, **keywords)
        keywords["device"] = on_host(device)
        if name in RANDOM and keywords.get("generator") is None:
            keywords["generator"] = generators.of(device)
        return function(*arguments, **keywords)

    return mapped


def _to(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def to(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if arguments:
            arguments = (on_host(arguments[0]), *arguments[1:])
        if "device" in keywords:
            keywords["device"] = on_host(keywords["device"])
        return method(self, *arguments, **keywords)

    return to


def _cuda(self: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    runtime.initialise()
    return self.to(torch.device("cuda", runtime.index_of(device)))


def install() -> None:
    """Replace the functions and methods of torch that take a device."""
    if settings.strict():
        from pretended_gpus import strict

        strict.install()
        return
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
    tensor.to, tensor.cuda = _to(tensor.to), _cuda
    tensor.pin_memory = lambda self, device=None: self
    context: Any = _device.DeviceContext
    context.__init__ = _with_device_on_host(context.__init__)


def _with_device_on_host(make: Callable[..., None]) -> Callable[..., None]:
    """For ``with torch.device("cuda")`` and torch.set_default_device."""

    @wraps(make)
    def made(self: Any, device: Any) -> None:
        make(self, on_host(device))

    return made
