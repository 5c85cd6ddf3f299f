"""Hears every call of chosen modules, and leaves nothing on them.

A hook on a model would travel with it into its copies and pickles, and torch.jit.script and
``torch.compile(fullgraph=True)`` refuse models with hooks of the kind that is needed here. So
``nn.Module.__call__`` itself is replaced while somebody listens. What a compiler or torch.jit
traces is not heard.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_equivalence.ranks import process_state
from ddp_equivalence.ranks.torch_frames import counts_as_torch

Heard = Callable[[object], None] | None
"""Gets what the module returned; None if nobody wants to know."""

Listener = Callable[[tuple[Any, ...]], Heard]
"""Gets the positional arguments of a call, and behind them the dict of its named arguments."""

_call = nn.Module.__call__
_listeners: dict[int, tuple[weakref.ref[nn.Module], list[Listener]]] = {}
"""id of a module -> the module and its listeners."""


@contextmanager
def heard(module: nn.Module, listener: Listener) -> Iterator[None]:
    """Inside the block, ``listener`` hears every call of the module. It can make no call fail."""
    listen(module, listener)
    try:
        yield
    finally:
        stop_listening(module, listener)


def listen(module: nn.Module, listener: Listener) -> None:
    """Let ``listener`` hear every call of the module from now on, which is not kept alive."""
    entry = _listeners.get(id(module))
    if entry is None or entry[0]() is not module:
        number = id(module)
        entry = weakref.ref(module, lambda _: _forget(number)), []
        _listeners[number] = entry
        if nn.Module.__call__ is not _listened_to:
            global _call
            _call = nn.Module.__call__  # perhaps a patch of the user, which must still be called
            nn.Module.__call__ = _listened_to  # type: ignore[method-assign]
    entry[1].append(listener)


def stop_listening(module: nn.Module, listener: Listener) -> None:
    """Undo ``listen``."""
    entry = _listeners.get(id(module))
    if entry is None or listener not in entry[1]:
        return
    entry[1].remove(listener)
    if not entry[1]:
        _forget(id(module))


def _forget(number: int) -> None:
    _listeners.pop(number, None)
    if process_state.is_a_rank():
        return  # the next case listens again, and replacing the method takes 0.3 ms
    if not _listeners and nn.Module.__call__ is _listened_to:
        nn.Module.__call__ = _call  # type: ignore[method-assign]


@counts_as_torch
def _listened_to(module: nn.Module, /, *arguments: Any, **named: Any) -> Any:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return _call(module, *arguments, **named)
    entry = _entry_of(module)
    if entry is None:
        return _call(module, *arguments, **named)
    then = [_told(listener, (*arguments, named)) for listener in tuple(entry[1])]
    result = _call(module, *arguments, **named)
    for hear in then:
        if hear is not None:
            _told(hear, result)
    return result


def _entry_of(module: nn.Module) -> tuple[weakref.ref[nn.Module], list[Listener]] | None:
    """The entry of the module, or of the module that torch.compile has wrapped in it."""
    entry = _listeners.get(id(module))
    if entry is None and type(module).__name__ == "OptimizedModule":
        module = module.__dict__["_modules"].get("_orig_mod")
        entry = _listeners.get(id(module))
    return entry if entry is not None and entry[0]() is module else None


def _told(listener: Callable[[Any], Any], what: object) -> Any:
    """What the listener returns; None if it raises, since it must not make the call fail.

    No transform of torch.func, and no mode, sees what the listener does.
    """
    try:
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableFuncTorch(),
            # Entering this costs more than everything else here, and is rarely needed.
            _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext(),
        ):
            return listener(what)
    except Exception:
        return None
