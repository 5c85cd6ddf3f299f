"""Digests of code and of objects, equal in two processes if what they hold is equal."""

from __future__ import annotations

import ctypes
import hashlib
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_KNOWN_CODES = 20_000


class NotPlain(Exception):
    """A container holds something else than constants and containers of them."""


OF_THIS_PROCESS = (
    *(io.IOBase, ctypes.CDLL, ctypes._SimpleCData, ctypes._Pointer, ctypes.Structure),
    *(weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
"""Types of objects that mean nothing in another process, even if they can be pickled.

Pytest also exchanges the standard streams for files of other types.
"""


def of_code(code: CodeType) -> bytes:
    """The digest of what the code does, wherever in its file it stands."""
    known = _known_codes.get(id(code))
    if known is None:
        if len(_known_codes) > MAX_KNOWN_CODES:
            _known_codes.clear()
        parts = [
            code.co_code,
            *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags),
            *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
            *map(_of_constant, code.co_consts),
        ]
        known = _known_codes[id(code)] = code, _digest(repr(parts).encode())
    return known[1]


_known_codes: dict[int, tuple[CodeType, bytes]] = {}
"""Id -> the code, which keeps its id, and its digest."""


def _of_constant(value: Any) -> object:
    if isinstance(value, CodeType):
        return of_code(value)
    if isinstance(value, frozenset):
        return sorted(repr(_of_constant(one)) for one in value)
    if isinstance(value, tuple):
        return tuple(map(_of_constant, value))
    return value


def of_plain(container: object) -> bytes:
    """The digest of a container that holds only constants and containers.

    Raises NotPlain for any other one. This runs at the speed of C.
    """
    sink = _Sink()
    pickler = _PlainPickler(sink, protocol=5)
    pickler.fast = True  # without a memo, since which equal strings are identical is chance
    try:
        pickler.dump(container)
    except (ValueError, RecursionError) as error:  # it contains itself
        raise NotPlain from error
    return sink.hash.digest()


def of_tensor(tensor: Tensor) -> bytes:
    """The digest of the elements of a tensor."""
    dense = tensor.detach().cpu() if tensor.layout is torch.strided else tensor.detach().to_dense()
    flat = dense.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return _digest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def of_object(value: object, of_function: Callable[[Any], bytes]) -> bytes:
    """The digest of an object, from what it would pickle itself as.

    Raises any error that its class raises. ``of_function`` gives the digest of a function or class
    that is not pickled as its name.
    """
    sink = _Sink()
    pickler = _ObjectPickler(sink, of_function, protocol=5)
    pickler.fast = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pickler.dump(value)
    return sink.hash.digest()


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


class _Sink:
    """A file that keeps only the digest of what is written."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return len(data)


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        raise NotPlain


class _ObjectPickler(pickle.Pickler):
    def __init__(self, sink: _Sink, of_function: Callable[[Any], bytes], protocol: int) -> None:
        super().__init__(sink, protocol)
        self._of_function = of_function
        self._outermost = True

    def reducer_override(self, value: Any) -> Any:
        outermost, self._outermost = self._outermost, False
        if value is bytes:
            return NotImplemented
        if isinstance(value, Tensor):
            return bytes, (of_tensor(value),)
        if isinstance(value, FunctionType | type):
            return bytes, (self._of_function(value),)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            array = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return bytes, (repr((value.dtype, value.shape)).encode() + _digest(array.data),)
        if not outermost:
            try:
                value.__reduce_ex__(5)
                can_travel = not isinstance(value, OF_THIS_PROCESS)
            except Exception:  # a lock inside the object, for example
                can_travel = False
            if not can_travel:
                return bytes, (repr(type(value)).encode(),)
        return NotImplemented
