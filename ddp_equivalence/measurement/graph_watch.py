"""Watches the autograd graph: where gradients end, and what a loss reaches."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from dis import get_instructions
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils import _pytree as pytree

from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    DeafBackward,
    TensorSample,
    is_users,
    lines_of,
    plain,
)
from ddp_equivalence.measurement.lines import Handler
from ddp_equivalence.ranks.users_line import counts_as_torch

# Sees where a step computes, from something that has a gradient, something that has none.
#
# Every function of torch that Python calls passes through a mode. A result without a gradient is
# followed from then on, so that it is known whether it went into the loss.

MOST_CUTS = 500
MOST_VALUES = 8
"""So many results of one line are sampled."""

MOST_FOLLOWED = 50_000
"""So many tensors are followed."""

SEQUENCES = (list, tuple)

GIVES_NUMBERS = frozenset({"item", "tolist", "numpy", "__float__", "__array__"})
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
            elif func.__name__ in GIVES_NUMBERS:
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


# Lines of a step at which a gradient ends, as data that the ranks send to the judging process.


@dataclass(frozen=True)
class Cut:
    """A tensor without a gradient was computed from one that has a gradient.

    ``what``: the operation, such as ``detach``. ``without_grad``: it ran where gradients are turned
    off, ``off_at``: by the user's line that did this, if it is known. ``line``: the innermost line
    of the user's code. ``backwards``: how many calls of backward had begun before; ``in_backward``:
    one of them ran. ``values``: samples of the first few results of this line, as they were then.

    ``is_leaf``: a result was made to require a gradient of its own, which goes no further.
    ``used_at``, ``used_by``: the first line and operation that computed something that has a
    gradient with such a result; None and "" if none was seen. ``reached``: backward began at
    something that was computed with it.
    """

    what: str
    line: CodeLine
    step: int
    backwards: int
    in_backward: bool = False
    without_grad: bool = False
    values: tuple[TensorSample, ...] = ()
    used_at: CodeLine | None = None
    used_by: str = ""
    reached: bool = False
    off_at: CodeLine | None = None
    is_leaf: bool = False


@dataclass(frozen=True)
class OwnBackward:
    """The backward method of an ``autograd.Function`` of the user's ran.

    ``name``: the class of the function. ``line``: the line that returned the gradients.
    ``backwards``: how many calls of backward had begun, with the one that runs. ``withheld``: the
    numbers of the inputs, from 0, that require a gradient and got None. ``times``: how often it
    ran so.
    """

    name: str
    line: CodeLine
    step: int
    backwards: int
    withheld: tuple[int, ...] = ()
    times: int = 1


# Finds the lines of the user's code that made the nodes of an autograd graph.
#
# Every node has a number, and the numbers of a thread only grow. So it is enough to note the next
# number after each line.

MOST_NODES_WITH_LINES = 500
"""Of a larger graph, only the nodes next to the loss are looked at."""


class GraphLines:
    """The lines that have added nodes to the graph of this thread."""

    def __init__(self) -> None:
        self._ends: list[int] = [_next_number()]
        self._lines: list[CodeLine | None] = [None]

    def after(self, line: CodeLine) -> None:
        """This line has run."""
        end = _next_number()
        if end != self._ends[-1]:
            self._ends.append(end)
            self._lines.append(line)

    def of(self, roots: Iterable[Tensor], beyond: Set[CodeLine]) -> Mapping[CodeLine, str]:
        """The lines that computed these tensors, the last one first, and the functions they used.

        Nodes behind one whose line is in ``beyond`` are left out.
        """
        found: dict[CodeLine, dict[str, None]] = {}
        waiting = deque(root.grad_fn for root in roots if root.grad_fn is not None)
        known: set[Any] = set()
        while waiting and len(known) < MOST_NODES_WITH_LINES:
            node = waiting.popleft()
            if node in known:
                continue
            known.add(node)
            line = self._line_of(node)
            if line is not None:
                found.setdefault(line, {})[node.name().partition("Backward")[0]] = None
            if line not in beyond:
                waiting += [one for one, _ in node.next_functions if one is not None]
        return {line: " ".join(names) for line, names in found.items()}

    def _line_of(self, node: Any) -> CodeLine | None:
        place = bisect_right(self._ends, node._sequence_nr())
        return self._lines[place] if place < len(self._lines) else None


def _next_number() -> int:
    # Torch 2.13 has no public way to ask for it.
    number: int = torch._C._autograd._get_sequence_nr()
    return number


# Notices the losses that a step makes, and the lines that make them.

MOST_LOSSES = 1_000
"""Later ones are not noticed, so that a loop over tokens leaves room for other calls."""

Note = Callable[[CodeLine, float, Any], object]
"""Gets the line, the value of the loss, and the node of the graph that made it."""


class LossWatch:
    """Tells ``note`` of every scalar with a gradient that a line leaves in a local variable, or
    returns, once in each function that gets hold of it. Attributes of objects, and entries of
    lists, are not looked at.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._known: dict[tuple[int, str], tuple[weakref.ref[Tensor], int]] = {}
        self._noted = 0

    def after_line(self, line: CodeLine, frame: FrameType, returned: Any) -> bool:
        """A line of this frame has run. Returns whether it has made a loss."""
        found = False
        for value in (*frame.f_locals.values(), returned):
            if isinstance(value, Tensor) and value.grad_fn is not None and value.numel() == 1:
                found |= self._see(line, value)
        return found

    def _see(self, line: CodeLine, loss: Tensor) -> bool:
        key = id(loss), line.function
        known = self._known.get(key)
        if known is not None and known[0]() is loss and known[1] == loss._version:
            return False
        self._known[key] = weakref.ref(loss), loss._version
        if self._noted >= MOST_LOSSES or loss.grad_fn is None:
            return False
        self._noted += 1
        with torch.no_grad():
            self._note(line, float(loss.detach()), loss.grad_fn)
        return True


# Finds which parameters each scalar on the way to a loss reaches.

MOST_TERMS = 64
"""So many scalars are followed until backward."""

MOST_NODES_OF_TERMS = 20_000
"""So many nodes of the graph are visited for one backward pass."""

MOST_BACKWARDS = 8
"""Only the first backward passes of a step are looked into, since the others are like them."""


class LossTerms:
    """``parameters``: id of a parameter -> its name. ``calls``: those of the step."""

    def __init__(self, parameters: Mapping[int, str], calls: list[Call]) -> None:
        self._parameters = parameters
        self._calls = calls
        self._nodes: list[tuple[int, Any]] = []
        self._backwards = 0

    def begin_step(self) -> None:
        """What happens from now on belongs to the next step."""
        self._nodes.clear()
        self._backwards = 0

    def add(self, number: int, node: Any) -> None:
        """The call of this number is a scalar, which this node of the graph made."""
        if len(self._nodes) < MOST_TERMS and self._backwards < MOST_BACKWARDS:
            self._nodes.append((number, node))

    def backward(self) -> None:
        """Backward begins: give the scalars since the last one the names of their parameters.

        A single scalar is the loss itself, which reaches everything.
        """
        self._backwards += 1
        known: dict[Any, frozenset[str]] = {}
        left = MOST_NODES_OF_TERMS
        for number, node in self._nodes if len(self._nodes) > 1 else ():
            names, visited = self._reached(node, known, left)
            left -= visited
            if left <= 0:
                break
            known[node] = names
            call = self._calls[number]
            self._calls[number] = replace(call, names=tuple(sorted(names)))
        self._nodes.clear()

    def _reached(
        self, node: Any, known: Mapping[Any, frozenset[str]], most: int
    ) -> tuple[frozenset[str], int]:
        """The parameters behind a node, and how many nodes were visited."""
        waiting, seen, names = [node], {node}, set[str]()
        while waiting and len(seen) <= most:
            one = waiting.pop()
            if one in known:
                names |= known[one]
                continue
            variable = getattr(one, "variable", None)
            if variable is not None and id(variable) in self._parameters:
                names.add(self._parameters[id(variable)])
            for following, _ in one.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return frozenset(names), len(seen)


# Notes which backward methods of the user's own ran, and which gradients they left out.

MOST_FOUND = 200
MOST_DECORATORS = 4

_APPLY = frozenset(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")  # torch 2.11 has only the first
    if hasattr(BackwardCFunction, name)
)


class OwnBackwards:
    """``now()``: the number of the step, how many calls of backward have begun, and whether one
    runs.
    """

    def __init__(self, now: Callable[[], tuple[int, int, bool]]) -> None:
        self._now = now
        self._found: dict[OwnBackward, int] = {}

    @property
    def found(self) -> tuple[OwnBackward, ...]:
        """What ran, in the order in which it ran first."""
        return tuple(replace(one, times=times) for one, times in self._found.items())

    def on_return(self, frame: FrameType, returned: object) -> None:
        """A function of the user's returns."""
        context: Any = _context_of(frame)
        if context is None:
            return
        code = frame.f_code
        gradients = returned if isinstance(returned, tuple) else (returned,)
        step, backwards, _ = self._now()
        needed = [number for number, needs in enumerate(context.needs_input_grad) if needs]
        edges = [node for node, _ in context.next_functions if node is not None]
        one = OwnBackward(
            name=type(context)._forward_cls.__name__,
            line=CodeLine(code.co_filename, frame.f_lineno, code.co_name),
            step=step,
            backwards=backwards,
            withheld=tuple(
                number
                for number, edge in zip(needed, edges, strict=True)
                if number < len(gradients) and gradients[number] is None and not _has_gradient(edge)
            ),
        )
        if one in self._found or len(self._found) < MOST_FOUND:
            self._found[one] = self._found.get(one, 0) + 1


def _has_gradient(edge: object) -> bool:
    """True for a parameter that has a gradient already, perhaps from a backward pass in here."""
    variable = getattr(edge, "variable", None)
    return variable is not None and variable.grad is not None


def _context_of(frame: FrameType) -> object:
    """The context of the function whose backward method this frame is; None if it is none."""
    caller = frame.f_back
    for _ in range(MOST_DECORATORS):
        if caller is None or is_users(caller.f_code.co_filename):
            return None
        if caller.f_code in _APPLY:
            return caller.f_locals.get("self")
        caller = caller.f_back
    return None


# Notes which backward methods of the user's own do not use the gradient that they are given.
#
# What a method computes is followed from the gradient that it gets: a gradient that it returns,
# and that nothing of this went into, is the same whatever comes in.

READ_BY_PYTHON = frozenset({"_local_scalar_dense", "is_nonzero", "equal"})
"""Operations after which Python knows something of a tensor, and may go on with it."""

UNSEEN = frozenset({"numpy", "tolist", "data_ptr", "from_numpy", "numba", "triton"})
"""A method that uses one of these names may compute what no operation of torch shows."""


@dataclass
class _Running:
    """A backward method that runs. ``reached``: the addresses of the storages that the gradient
    which it was given has gone into. ``is_known``: False once Python has read one of them.
    """

    reached: set[int] = field(default_factory=set)
    is_known: bool = True


class DeafBackwards:
    """``address_of``: that of a tensor's storage. ``is_as_written``: True if a tensor holds what
    the last operation that wrote to it has left there.
    """

    def __init__(
        self,
        address_of: Callable[[Tensor], int | None],
        is_as_written: Callable[[Tensor], bool],
    ) -> None:
        self._address_of = address_of
        self._is_as_written = is_as_written
        self._running: list[_Running] = []
        self._deaf: dict[tuple[str, int], bool] = {}

    @property
    def found(self) -> tuple[DeafBackward, ...]:
        """The methods, with the inputs whose gradient never depended on the one that came in."""
        by_name: dict[str, list[int]] = {}
        for (name, number), is_deaf in sorted(self._deaf.items()):
            if is_deaf:
                by_name.setdefault(name, []).append(number)
        return tuple(DeafBackward(name, tuple(inputs)) for name, inputs in by_name.items())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        with (
            patch.object(BackwardCFunction, "apply", self._watched(BackwardCFunction.apply)),
            patch.object(
                BackwardCFunction, "apply_boxed", self._watched(BackwardCFunction.apply_boxed)
            ),
        ):
            yield

    def after_operation(self, name: str, given: Iterable[Tensor], left: Iterable[Tensor]) -> None:
        """An operation of torch has run. ``left``: what it returned, or wrote to."""
        if not self._running:
            return
        read, written = self._addresses(given), self._addresses(left)
        for one in self._running:
            if read & one.reached:
                one.reached |= written
                one.is_known = one.is_known and name not in READ_BY_PYTHON

    def _watched(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        @counts_as_torch
        def watched(context: Any, *arguments: Any) -> Any:
            given = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
            running = _Running(self._addresses(given))
            self._running.append(running)
            try:
                returned = apply(context, *arguments)
            finally:
                self._running.remove(running)
            if running.is_known and _matters(given) and not _may_hide(context):
                self._note(context, running, returned)
            return returned

        return watched

    def _note(self, context: Any, running: _Running, returned: object) -> None:
        name = type(context)._forward_cls.__name__
        is_unused = _never_reads_gradients(context)
        gradients = returned if isinstance(returned, tuple) else (returned,)
        for number, one in enumerate(gradients):
            if isinstance(one, Tensor) and bool(one.any()):
                address = self._address_of(one)
                is_known = address is not None and (is_unused or self._is_as_written(one))
                is_deaf = is_known and address not in running.reached
                self._deaf[name, number] = is_deaf and self._deaf.get((name, number), True)

    def _addresses(self, tensors: Iterable[Tensor]) -> set[int]:
        found = (self._address_of(one) for one in tensors)
        return {one for one in found if one is not None}


def _matters(given: Iterable[Tensor]) -> bool:
    """True unless all that comes in is 1, with which every product is the same."""
    return any(bool((one != 1).any()) for one in given)


def _never_reads_gradients(context: Any) -> bool:
    """True if no instruction of the method uses any of its arguments but the first."""
    code = _code_of(context)
    if code is None or code.co_flags & (CO_VARARGS | CO_VARKEYWORDS):
        return False
    names = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    return bool(names) and not any(
        names.intersection(one.argval if isinstance(one.argval, tuple) else (one.argval,))
        for one in get_instructions(code)
        if isinstance(one.argval, str | tuple)
    )


def _code_of(context: Any) -> CodeType | None:
    method = context._get_user_fn()
    code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _may_hide(context: Any) -> bool:
    """True if the method may compute something that is not seen here."""
    code = _code_of(context)
    return code is None or bool(UNSEEN.intersection(code.co_names))
