"""Backward passes run on another thread, as autograd runs those of a CUDA device.

That thread has autograd's thread-local state, such as the stack of dispatch modes, and neither a
trace function nor the caller's frames. With ``torch.autograd.set_multithreading_enabled(False)``
the calling thread runs the backward pass itself.
Source: the threads of devices in torch/csrc/autograd/engine.cpp; tried on an H200 with torch 2.11.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import overrides
from torch.autograd import graph
from torch.utils import _python_dispatch

from pretended_gpus import runtime, settings

_thread = threading.local()
"""``is_device``: True in a thread that runs a backward pass for a device."""


def _runs_here() -> bool:
    """True if the calling thread runs the backward pass, or runs one already."""
    return (
        not (settings.on_rank() and runtime.is_initialised())
        or not torch._C._is_multithreading_enabled()
        or getattr(_thread, "is_device", False)
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    )


@contextmanager
def _as_device(device: int, dispatch: list[Any], function: list[Any]) -> Iterator[None]:
    """The block runs with these modes, on a thread whose current device is this one."""
    _thread.is_device = True
    runtime.set_current(device)
    for mode in dispatch:
        _python_dispatch._push_mode(mode)
    for mode in function:
        overrides._push_mode(mode)
    try:
        yield
    finally:  # C++ must not free what is left when the thread ends
        for _ in function:
            overrides._pop_mode()
        for mode in reversed(dispatch):
            _python_dispatch._pop_mode(getattr(mode, "_mode_key", None))


def _on_its_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def running(*arguments: Any, **keywords: Any) -> Any:
        if _runs_here():
            return run(*arguments, **keywords)
        state = (
            runtime.current(),
            _python_dispatch._get_current_dispatch_mode_stack(),
            overrides._get_current_function_mode_stack(),
        )

        def on_device() -> Any:
            with _as_device(*state):
                return run(*arguments, **keywords)

        with ThreadPoolExecutor(1, "autograd of a pretended GPU") as device:
            return device.submit(on_device).result()

    return running


def install() -> None:
    """Replace the function through which all backward passes go."""
    names: Any = torch.autograd
    names._engine_run_backward = _on_its_thread(graph._engine_run_backward)
    graph._engine_run_backward = names._engine_run_backward
