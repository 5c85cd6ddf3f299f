"""Sees where a step computes, from something that has a gradient, something that has none.

Every function of torch that Python calls passes through a mode. A result without a gradient is
followed from then on, so that it is known whether it went into the loss.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.code_lines import lines_of
from ddp_equivalence.measurement.cuts import Cut
from ddp_equivalence.measurement.line_tracer import Handler
from ddp_equivalence.measurement.plain_tensors import plain
from ddp_equivalence.measurement.trace import TensorSample

MOST_CUTS = 500
MOST_VALUES = 8
"""So many results of one line are sampled."""

MOST_FOLLOWED = 50_000
"""So many tensors are followed."""

SEQUENCES = (list, tuple)

TO_PYTHON = frozenset({"item", "tolist", "numpy", "__float__", "__array__"})
"""These give numbers of Python or numpy, which have no gradient."""

OF_NO_VALUES = frozenset({"grad", "_grad", "new_tensor", "new_empty", "new_zeros", "new_ones"})
"""What these return does not depend on the values of a tensor that has a gradient."""


class CutWatch(TorchFunctionMode):
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs.
    """

    def __init__(self, now: Callable[[], tuple[int, int, bool]]) -> None:
        super().__init__()
        self._now = now
        self._cuts: dict[tuple[object, ...], int] = {}
        self._found: list[Cut] = []
        self._followed: dict[int, tuple[weakref.ref[Tensor], frozenset[int]]] = {}
        self._numbers: dict[float, int] = {}
        self._resumed: set[int] = set()
        self._off_at: list[CodeLine | None] = []

    @property
    def found(self) -> tuple[Cut, ...]:
        """The cuts of all steps, in the order in which their lines ran first."""
        return tuple(self._found)

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions that turn gradients off, and on again."""
        return {
            torch.no_grad.__enter__.__code__: self._on_off,
            torch.no_grad.__exit__.__code__: self._on_again,
            torch.inference_mode.__enter__.__code__: self._on_off,
            torch.inference_mode.__exit__.__code__: self._on_again,
        }

    def off_at(self) -> CodeLine | None:
        """The user's line that has turned gradients off last, while they are off."""
        return self._off_at[-1] if self._off_at else None

    def _on_off(self, frame: FrameType) -> None:
        self._off_at.append(lines_of(frame)[1])

    def _on_again(self, frame: FrameType) -> None:
        if self._off_at:
            self._off_at.pop()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread inside the block."""
        _push_mode(self)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> bool:
        """Stop watching, and return whether this was watching, so that ``resume`` goes on."""
        if _get_current_function_mode() is not self:
            return False
        _pop_mode()
        return True

    def resume(self) -> None:
        """Watch again."""
        _push_mode(self)

    def around_compiler(self, frame: FrameType) -> Callable[..., Any] | None:
        """A function of torch's compiler begins: what it compiles must not see this mode.

        Returns what is to follow the frame.
        """
        if not self.pause():
            return None
        frame.f_trace_lines = False

        def follow(frame: FrameType, event: str, argument: object) -> Any:
            if event == "return":
                self.resume()
            return follow

        return follow

    def frame_begins(self, frame: FrameType) -> None:
        """A function of the user's begins inside a backward pass, where torch removes all modes."""
        if _get_current_function_mode() is not self:
            self._resumed.add(id(frame))
            self.resume()

    def frame_returns(self, frame: FrameType) -> None:
        """It returns."""
        if id(frame) in self._resumed:
            self._resumed.discard(id(frame))
            self.pause()

    def backward(self, roots: Iterable[Tensor]) -> None:
        """Backward begins at these tensors."""
        for number in frozenset().union(*(self._of(root) for root in roots)):
            self._found[number] = replace(self._found[number], reached=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if torch._C._is_tracing():  # what is done here would become a part of the trace
            return result
        try:
            kind = type(result)
            if kind is Tensor:
                self._after(func, _tensors((args, kwargs)), args, result)
            elif func.__name__ in TO_PYTHON:
                self._to_python(func.__name__, args, result)
            elif kind in SEQUENCES:
                self._after(func, _tensors((args, kwargs)), args, result)
            elif func.__name__ == "__setitem__":
                self._after(func, _tensors((args, kwargs)), args, args[0])
        except Exception:  # never fail in the user's step
            return result
        return result

    def _after(self, func: Any, given: list[Tensor], args: Any, result: Any) -> None:
        requires, before, fresh = False, frozenset[int](), frozenset[int]()
        for one in given:
            cuts = self._of(one) if self._followed else frozenset[int]()
            if one.requires_grad:
                requires = True
            else:
                fresh |= cuts
            before |= cuts
        if self._numbers:
            numbers = {
                self._numbers[one] for one in args if type(one) is float and one in self._numbers
            }
            before, fresh = before | numbers, fresh | numbers
        if not requires and not before:
            return
        for one in (result,) if isinstance(result, Tensor) else result:
            if type(one) is not Tensor or not (one.is_floating_point() or one.is_complex()):
                continue
            if one.requires_grad:
                if func.__name__ in ("requires_grad_", "__set__"):
                    self._note_leaf(self._of(one))
                elif before:
                    self._note_use(fresh, name_of(func))
                    self._follow(one, before)
            elif requires and not any(one is other for other in given if other.requires_grad):
                number = self._cut(name_of(func), one)
                self._follow(one, before if number is None else before | {number})
            elif before:
                self._follow(one, before)

    def _to_python(self, name: str, args: Sequence[Any], result: object) -> None:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return
        if not args[0].requires_grad:
            if args[0].numel() > 1:
                self._note_use(self._of(args[0]), name)
            return
        number = self._cut(name, args[0])
        if number is not None and isinstance(result, float) and not result.is_integer():
            self._numbers[result] = number

    def _of(self, tensor: Tensor) -> frozenset[int]:
        known = self._followed.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else frozenset()

    def _follow(self, tensor: Tensor, cuts: frozenset[int]) -> None:
        if cuts and len(self._followed) < MOST_FOLLOWED:
            self._followed[id(tensor)] = weakref.ref(tensor), cuts

    def _cut(self, what: str, result: Tensor) -> int | None:
        """The number of the cut; None if it is none of the user's."""
        if what in OF_NO_VALUES or what.endswith("_like"):
            return None
        frame = sys._getframe(2)
        line = lines_of(frame)[1]
        if line is None or _is_inside_a_function(frame):
            return None
        step, backwards, in_backward = self._now()
        key = line, what, step, backwards, in_backward
        number = self._cuts.get(key)
        if number is None:
            if len(self._found) >= MOST_CUTS:
                return None
            number = self._cuts[key] = len(self._found)
            off = not torch.is_grad_enabled()
            off_at = self.off_at() if off else None
            self._found.append(Cut(what, line, step, backwards, in_backward, off, off_at=off_at))
        found = self._found[number]
        if len(found.values) < MOST_VALUES:
            sample = TensorSample.of(plain(result))
            self._found[number] = replace(found, values=(*found.values, sample))
        return number

    def _note_leaf(self, cuts: frozenset[int]) -> None:
        for number in cuts:
            self._found[number] = replace(self._found[number], is_leaf=True)

    def _note_use(self, cuts: frozenset[int], what: str) -> None:
        unused = [one for one in cuts if self._found[one].used_at is None]
        if not unused:
            return
        line: CodeLine | None = lines_of(sys._getframe(2))[1]
        for one in unused:
            self._found[one] = replace(self._found[one], used_at=line, used_by=what)


def name_of(func: Any) -> str:
    """The name of a function of torch, or of the attribute that it reads."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def _tensors(values: Any, deepest: int = 3) -> list[Tensor]:
    """The tensors among the arguments of a call."""
    found: list[Tensor] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict) and deepest:
            found += _tensors(value, deepest - 1)
    return found


def _is_inside_a_function(frame: FrameType | None) -> bool:
    """True inside the forward method of an ``autograd.Function``, which has its own backward."""
    while frame is not None:
        code = frame.f_code
        # The id of a code is its key, because a hash of its content would take longer.
        known = _FORWARD_METHODS.get(id(code))
        if known is None:
            # A step that is unpickled for every check is new code of the same place.
            name, line = f"{code.co_filename} {code.co_qualname}", code.co_firstlineno
            place = name, line, code.co_names, code.co_code
            if place not in _AT_PLACES:
                _AT_PLACES[place] = _is_forward(code)
            known = _FORWARD_METHODS[id(code)] = code, _AT_PLACES[place]
        if known[1]:
            return True
        frame = frame.f_back
    return False


_FORWARD_METHODS: dict[int, tuple[CodeType, bool]] = {}
"""id of a code -> the code, and whether it is that of a forward method."""

_AT_PLACES: dict[tuple[object, ...], bool] = {}
"""The same for every code of one place, which it takes a walk through all functions to know."""


def _is_forward(code: CodeType) -> bool:
    """True for the forward method of an ``autograd.Function``. Since torch 2.14 it is called from
    C, so that there is no frame of ``apply`` to look for.
    """
    waiting: list[Any] = [Function]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        method = getattr(one, "forward", None)  # perhaps of another base class
        while method is not None:  # it may be decorated
            if getattr(method, "__code__", None) is code:
                return True
            method = getattr(method, "__wrapped__", None)
    return False
