"""The state of CUDA in this process: whether it is initialised, and each thread's device."""

from __future__ import annotations

import os
import threading
import warnings

import torch

from pretended_gpus import contexts, settings, visible

FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. "
    "To use CUDA with multiprocessing, you must use the 'spawn' start method"
)


class State:
    """``shown``: the visible GPUs as of initialisation. ``used``: a fork could not use CUDA."""

    def __init__(self) -> None:
        self.shown: list[int] | None = None
        self.used = False
        self.is_bad_fork = False


state = State()
_thread = threading.local()


def gpus() -> list[int]:
    """The physical GPU behind each CUDA device. CUDA reads the environment only once."""
    return visible.visible() if state.shown is None else state.shown


def count() -> int:
    """As torch.cuda.device_count: where NVML cannot count, as with MIG devices, it asks CUDA.

    After that, a fork of this process cannot use CUDA.
    """
    if state.shown is None and torch.cuda._device_count_nvml() < 0:
        state.used = True
        if settings.nvml() == "mismatch":
            warnings.warn("CUDA initialization: unsupported display driver", stacklevel=2)
            return 0
    return len(gpus())


def is_initialised() -> bool:
    return state.shown is not None and not state.is_bad_fork


def initialise() -> None:
    """As torch.cuda.init."""
    if is_initialised():
        return
    if state.is_bad_fork:
        raise RuntimeError(FORKED)
    if not gpus():
        raise RuntimeError("No CUDA GPUs are available")
    state.shown, state.used = gpus(), True
    settings.log("initialised")
    from pretended_gpus import generators, rounding

    generators.start()
    if settings.on_rank():
        rounding.start()


def current() -> int:
    """The index of this thread's device."""
    return getattr(_thread, "device", 0)


def has_chosen() -> bool:
    """True if this thread has chosen a device."""
    return hasattr(_thread, "device")


def set_current(index: int) -> None:
    """Make a device that of this thread, which starts a context on it."""
    if index < 0:
        return
    use(index)
    _thread.device = index


def use(index: int) -> torch.device:
    """Start a context on a device unless there is one; returns the device."""
    initialise()
    if not 0 <= index < len(gpus()):
        raise contexts.cuda_error("invalid device ordinal")
    contexts.enter(gpus()[index])
    return torch.device("cuda", index)


def index_of(device: object) -> int:
    """The index of a CUDA device that is given in any of the ways that torch accepts."""
    if device is None:
        return current()
    if isinstance(device, int):
        return device
    if not isinstance(device, torch.device):
        device = torch.device(str(device))
    if device.type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return current() if device.index is None else device.index


def _after_fork() -> None:
    state.is_bad_fork = state.used
    contexts.forget()


os.register_at_fork(after_in_child=_after_fork)
