"""The settings of a process that a case could hand on to the next one, such as the default dtype.

A rank compares them before and after its work and restores them. It also takes some of them over
from the judging process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

PRECISION_MODULES = {
    "backends": ("generic", "all"),
    "backends.cuda.matmul": ("cuda", "matmul"),
    "backends.cudnn": ("cuda", "all"),
    "backends.cudnn.conv": ("cuda", "conv"),
    "backends.cudnn.rnn": ("cuda", "rnn"),
    "backends.mkldnn": ("mkldnn", "all"),
    "backends.mkldnn.matmul": ("mkldnn", "matmul"),
    "backends.mkldnn.conv": ("mkldnn", "conv"),
    "backends.mkldnn.rnn": ("mkldnn", "rnn"),
}
"""The modules in ``torch`` that have a setting ``fp32_precision``, and torch's own names for the
backend and the operation of each. Source: torch/backends/__init__.py and the files beside it.
"""


@dataclass(frozen=True)
class ProcessSetting:
    """How to read one setting and how to write it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def read_all() -> dict[str, Any]:
    """The value of every setting, by name."""
    return {name: setting.read() for name, setting in SETTINGS.items()}


def read_training_settings() -> dict[str, Any]:
    """The settings in ``TRAINING_SETTINGS``, by name."""
    return {name: SETTINGS[name].read() for name in TRAINING_SETTINGS}


def apply(settings: Mapping[str, Any]) -> None:
    """Give this process these settings."""
    for name, value in settings.items():
        if SETTINGS[name].read() != value:
            SETTINGS[name].write(value)


def restore(before: Mapping[str, Any]) -> list[str]:
    """Give this process these settings and return, as phrases, those that were different."""
    now = {name: SETTINGS[name].read() for name in before}
    if now == before:
        return []
    changed = [
        f"{name} changed from {old} to {now[name]}"
        for name, old in before.items()
        if now[name] not in (old, "")  # "": it cannot be read now, and another setting shows why
    ]
    apply(before)
    return changed


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
    """The float32 precision of one backend and operation.

    Every case reads all of them several times. So they are read where the modules themselves read
    them, which takes a fraction of the time. That function is private: a test fails if it changes.
    """
    read = partial(torch._C._get_fp32_precision_getter, *PRECISION_MODULES[module])

    def write(value: str) -> None:
        attrgetter(module)(torch).fp32_precision = value

    return ProcessSetting(read, write)


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
