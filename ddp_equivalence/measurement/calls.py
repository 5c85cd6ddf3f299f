"""The calls of a step that matter for its gradients, each with the line of code that made it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import CodeType, EllipsisType, FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_equivalence.case.batch_tree import attributes_of
from ddp_equivalence.comparison.gradients import bytes_of
from ddp_equivalence.measurement.whole_tensors import is_flattened
from ddp_equivalence.ranks.importable import belongs_to_user

# These are frozen dataclasses. The ranks send them to the judging process with an
# ``Observation``.


@dataclass(frozen=True)
class CodeLine:
    """A line of a file. ``function``: the name of the function that it stands in."""

    file: str
    number: int
    function: str = ""


class Kind(Enum):
    """The kind of a call, or of what a line was seen to do."""

    WRAP = "wrap"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    POINT_TO_POINT = "point to point"
    NOT_IN_GROUP = "collective of a group without this rank"
    NO_SYNC = "no_sync"
    CLIP = "clip"
    ZERO_GRAD = "zero_grad"
    OPTIMIZER_STEP = "optimizer step"
    NEW_GROUP = "new group"
    SEED = "seed"
    SHUFFLE = "shuffle"
    SCALE = "scale"
    UNSCALE = "unscale"
    SAMPLER = "sampler"
    LOADER = "loader"
    HOOK = "communication hook"
    TENSOR_HOOK = "tensor hook"
    IGNORE = "ignore"
    SHARDING = "sharding"
    OPTIMIZER = "an optimizer is made"
    REPLICATE = "a module is given hooks that reduce"
    JOIN = "join of ranks with different numbers of inputs"
    REPLACED = "an optimizer steps parameters that shards have replaced"
    DIVIDE_FACTOR = "divide factor"
    # A module that draws or couples examples, and a line that sets an attribute of one.
    MODULE = "module"
    MODULE_STATE = "state of a module"
    # Lines that change gradients, weights, buffers or flags.
    CHANGE = "change"
    WEIGHTS = "weights"
    BUFFERS = "buffers"
    REQUIRES_GRAD = "requires_grad"
    SYNCHRONISATION = "synchronisation"
    EQUAL = "a tensor is declared to be equal on several ranks"
    # Lines that make a scalar with a gradient, compute a part of the loss of a backward, set a
    # variable to positions, or first hold what a forward pass reads.
    LOSS = "loss"
    LOSS_FUNCTIONS = "functions of the loss"
    READ = "read"


class Contents(Enum):
    """How the tensors of a collective are related to those of the model."""

    GRADIENTS = "gradients"
    COPIES_OF_GRADIENTS = "copies of gradients"
    PARAMETERS = "parameters"
    COPIES_OF_PARAMETERS = "copies of parameters"
    BUFFERS = "buffers"
    OTHER = "other"


@dataclass(frozen=True)
class CollectiveCall:
    """A collective that Python issued.

    ``op``: the function, such as ``all_reduce``. ``reduce_op``: such as ``SUM``; "" if it reduces
    nothing. ``ranks``: of its group, in their order. ``elements``: of all its tensors of
    floating-point numbers. ``names``: the parameters that ``contents`` is about. ``factor``: copies
    are this many times what they are copied from. ``asynchronous``: it returned a handle.
    ``dtype``: of its first tensor of floating-point numbers, such as ``bfloat16``; "" without one.
    ``loses_gradient``: a tensor that went in required a gradient, and what comes out has none.
    ``parts_of``: of contents that are something else, the parameters from whose gradients every
    element was taken, such as some rows of one.
    """

    op: str
    reduce_op: str
    ranks: tuple[int, ...]
    elements: int
    contents: Contents
    names: tuple[str, ...] = ()
    factor: float = 1.0
    asynchronous: bool = False
    dtype: str = ""
    loses_gradient: bool = False
    parts_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientChange:
    """A change of ``.grad`` of parameters by a line, other than by a backward pass.

    ``names``: of the parameters. ``factor``: the number that they were multiplied by; None if it
    was something else. ``cleared``: they were set to None or to zero. ``exact``: False if the
    change was made after the line before this call's, and not later than this call's.
    """

    names: tuple[str, ...]
    factor: float | None = None
    cleared: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Call:
    """One call of a step.

    ``line``: the innermost line outside torch and this package; None if it is not known.
    ``users_line``: the innermost line of the user's own code; it differs from ``line`` where an
    installed package made the call. ``callers``: the user's lines that led to it, the innermost
    first. ``step``: the number of the step, from 0. ``backwards``: how many calls of backward had
    begun before in this step. ``in_backward``: the call was made while a backward pass ran.

    ``value``: the loss of a backward or a line, the limit of a clip, a seed, a scale or a divide
    factor, the length of the data set of a sampler or loader, the norm of a tensor that is declared
    to be equal; 0 or 1 for what was switched off or on (synchronisation, requires_grad, a join that
    divides by all ranks). ``norm``: what a clip by the norm found before it clipped; None if that
    is not known. ``numbers``: those that a sampler or loader was given, by name.
    ``what``: the class, function or operation that is called, a sampler or loader as text, a digest
    of the weights, or an attribute of a module with its new value. ``names``: the parameters that
    it is about; the names of modules; the functions of autograd that computed a loss. ``ranks``: of
    a new group, among which a wrapper reduces gradients, or on which a tensor is declared to be
    equal; () if that is not known. ``collective`` and ``change``: of calls of these kinds.
    ``examples``: the positions, in the batch of all steps, that a forward pass read; () if they are
    not known.
    ``dtype``: of a tensor, or in which a wrapper was told to reduce, such as ``bfloat16``.
    ``made_at``: where the loss of a backward was computed, where the function of a hook or the
    sampler of a loader begins, or which line first held the tensor that went into a collective.
    ``chosen_at``: of a forward pass, the line of the user's that named the module; functions that
    were given it come below.
    """

    kind: Kind
    line: CodeLine | None
    users_line: CodeLine | None
    step: int
    backwards: int
    value: float | None = None
    norm: float | None = None
    what: str = ""
    names: tuple[str, ...] = ()
    collective: CollectiveCall | None = None
    change: GradientChange | None = None
    ranks: tuple[int, ...] = ()
    in_backward: bool = False
    chosen_at: CodeLine | None = None
    examples: tuple[int, ...] = ()
    made_at: CodeLine | None = None
    callers: tuple[CodeLine, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    dtype: str = ""

    @property
    def at(self) -> CodeLine | None:
        """The line that a report shows: the user's own, or else the innermost one."""
        return self.users_line or self.line

    @property
    def factor(self) -> float | None:
        """The factor by which gradients were multiplied; None if they were not."""
        return None if self.change is None else self.change.factor

    @property
    def clears(self) -> bool:
        """True if gradients were set to None or to zero."""
        return self.change is not None and self.change.cleared

    @property
    def rewrites(self) -> bool:
        """True if gradients were changed other than by a number."""
        return self.change is not None and self.change.factor is None


# Finds the lines of code that called a function, outside torch and this package.

_TORCH = os.path.join(os.path.dirname(os.path.realpath(torch.__file__)), "")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "")


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """True for a file of the user's own code."""
    return not file.startswith("<") and belongs_to_user(file)


@lru_cache(maxsize=4096)
def is_shown(file: str) -> bool:
    """True for a file that is part neither of torch nor of this package nor of Python."""
    if is_users(file):
        return True
    path = os.path.realpath(file)
    in_package = "site-packages" in path or "dist-packages" in path
    return in_package and not path.startswith((_TORCH, _PACKAGE)) and not file.startswith("<")


def line_at(frame: FrameType) -> CodeLine:
    """The line at which a frame is."""
    code = frame.f_code
    return CodeLine(code.co_filename, frame.f_lineno, code.co_name)


def lines_of(frame: FrameType | None) -> tuple[CodeLine | None, CodeLine | None]:
    """The innermost line outside torch and this package, and the innermost one of the user's."""
    innermost: CodeLine | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_shown(file):
            line = CodeLine(file, frame.f_lineno, frame.f_code.co_name)
            innermost = innermost or line
            if is_users(file):
                return innermost, line
        frame = frame.f_back
    return innermost, None


MOST_CALLERS = 8
"""So many lines that led to a call are kept."""


def callers_of(frame: FrameType | None) -> tuple[CodeLine, ...]:
    """The user's lines that led to a call, the innermost first, without the one that made it."""
    found: list[CodeLine] = []
    while frame is not None and len(found) <= MOST_CALLERS:
        code = frame.f_code
        if is_users(code.co_filename):
            found.append(CodeLine(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found[1:])


def callers_behind(line: CodeLine, frame: FrameType | None) -> tuple[CodeLine, ...]:
    """The user's lines that led to the function of a line that runs, or has just run in it."""
    while frame is not None:
        code = frame.f_code
        if (code.co_filename, code.co_name) == (line.file, line.function):
            return callers_of(frame)
        frame = frame.f_back
    return ()


def line_that_named(module: object, frame: FrameType | None) -> CodeLine | None:
    """The user's line that named a module which is called now.

    A function that was given the module as an argument did not choose it; its caller did.
    """
    line: CodeLine | None = None
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            line = CodeLine(code.co_filename, frame.f_lineno, code.co_name)
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if not any(frame.f_locals.get(name) is module for name in arguments):
                return line
        frame = frame.f_back
    return line


def users_code_of(function: object) -> CodeType | None:
    """The code that runs when a function, a partial or an object is called; None if it is not the
    user's.
    """
    while isinstance(function, functools.partial):
        function = function.func
    call = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None) or getattr(call, "__code__", None)
    return code if isinstance(code, CodeType) and is_users(code.co_filename) else None


def beginning_of(function: object) -> CodeLine | None:
    """The first line of a function of the user's; None if it is somebody else's."""
    code = users_code_of(function)
    if code is None:
        return None
    return CodeLine(code.co_filename, code.co_firstlineno, code.co_name)


# Finds the plain tensors in the arguments of a call, however they are packed.

DEEPEST = 4
MOST_OPENED = 200
"""So many objects are opened, down to this depth."""


class NotPlain(Exception):
    """A tensor has no values of its own in memory, so nothing can be said of its values."""


def tensors_in(arguments: object) -> list[Tensor]:
    """All tensors, in a fixed order; also those in dataclasses, mappings and other objects.

    Raises NotPlain if the values of one are not known.
    """
    return [plain(leaf) for leaf in leaves_of_arguments(arguments) if isinstance(leaf, Tensor)]


def leaves_of_arguments(arguments: object) -> Iterator[object]:
    """The leaves of a pytree. Objects that are no pytrees are opened too."""
    seen: set[int] = set()

    def opened(value: object, depth: int) -> Iterator[object]:
        for leaf in pytree.tree_leaves(value):
            inside = None if isinstance(leaf, Tensor) else _inside(leaf)
            if inside is None or depth >= DEEPEST:
                yield leaf
            elif id(leaf) not in seen and len(seen) < MOST_OPENED:
                seen.add(id(leaf))
                yield from opened(inside, depth + 1)

    return opened(arguments, 0)


def _inside(leaf: object) -> list[Any] | None:
    """The values that an object holds; None if it is not opened."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if type(leaf).__module__ in ("builtins", "torch") or isinstance(leaf, type | nn.Module):
        return None
    return list(attributes_of(leaf).values()) or None


def plain(tensor: Tensor) -> Tensor:
    """The tensor without the wrapper that torch.func puts around it while it transforms.

    Raises NotPlain for a tensor that a compiler traces, for one that is sharded, nested, quantized
    or on the meta device.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        batched = torch._C._functorch.is_batchedtensor(tensor)
        dim = torch._C._functorch.maybe_get_bdim(tensor) if batched else 0
        tensor = torch._C._functorch.get_unwrapped(tensor)
        tensor = tensor.movedim(dim, 0) if dim > 0 else tensor
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_flattened(tensor):
        raise NotPlain(type(tensor).__name__)
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        raise NotPlain(str(tensor.layout))
    return tensor if type(tensor) is Tensor else tensor.detach().as_subclass(Tensor)


# The operations of torch that a step ran on one rank, as data.


@dataclass(frozen=True)
class Value:
    """A tensor's contents. ``elements``: as bytes of float64. ``dtype``: of the tensor itself."""

    shape: tuple[int, ...]
    dtype: str
    elements: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        """The values of a plain tensor."""
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), name, packed(tensor.detach().reshape(-1)))

    @property
    def tensor(self) -> Tensor:
        """The values again, of dtype float64."""
        return unpacked(self.elements).reshape(self.shape)

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.dtype


@dataclass(frozen=True)
class NameAt:
    """A name in a function: a local variable, or ``self.x`` for an attribute of self.

    ``begins``: the number of the first line of the function, with its decorators.
    """

    file: str
    begins: int
    name: str


Held: TypeAlias = "Value | EllipsisType | tuple[tuple[str, Held], ...] | float | int | str | None"
"""What a name held; of a list or a dictionary its parts, with their places or keys as text. The
dots stand for what is not kept, such as an object.
"""


@dataclass(frozen=True)
class Operation:
    """One operation. ``name``: torch's own. ``line``: the innermost line of the user's code.

    ``given``: the values that it was given, as numbers in ``Operations.values``; None for one that
    was not kept. ``returned``: the same of what it returned, or wrote. ``writers``: for each value
    that it was given, the operation that wrote it; None if none of the step's did. ``talks``: to
    other ranks. ``draws``: random numbers. ``differentiable``: a tensor that it was given requires
    a gradient. ``in_backward``: it ran inside a backward pass. ``numbers``: of Python, by which it
    multiplied or divided. ``loses_gradient``: it talks to other ranks, and autograd knows nothing
    of it, although a tensor that it was given was computed from one that requires a gradient.
    ``required``: which of the tensors that it was given require a gradient; ``leaves``: which of
    them are leaves of autograd's graph. ``recorded``: False where gradients were turned off.
    """

    name: str
    line: CodeLine | None
    given: tuple[int | None, ...]
    returned: tuple[int | None, ...]
    writers: tuple[int | None, ...]
    talks: bool = False
    draws: bool = False
    differentiable: bool = False
    in_backward: bool = False
    numbers: tuple[float, ...] = ()
    loses_gradient: bool = False
    required: tuple[bool, ...] = ()
    leaves: tuple[bool, ...] = ()
    recorded: bool = True

    @property
    def after(self) -> frozenset[int]:
        """The operations on which it depends directly."""
        return frozenset(writer for writer in self.writers if writer is not None)


@dataclass(frozen=True)
class Operations:
    """All operations of a step, in their order.

    ``results``: the name of a gradient, or of an update -> the operation that wrote it last, and
    ``left``: the number of its value. ``complete``: False if there were too many operations to
    record them all. ``names``: what the names in the user's functions held when each call of the
    function ended.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    results: Mapping[str, int]
    left: Mapping[str, int]
    complete: bool
    names: Mapping[NameAt, tuple[Held, ...]] = field(default_factory=dict)


# What a watched step had on its way: the modules that it called, and gradients after each change.
#
# Only samples of gradients are kept, as bytes, so that they may travel by the hundred to the
# judging process.


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, outside of backward passes.

    ``name``: "" for the model itself. ``line``: the line that called it, of the user's code.
    ``dtypes``: of the floating-point numbers that it was given and that it returned.
    ``with_gradients``: False if it was called where gradients are turned off.
    """

    name: str
    line: CodeLine | None
    dtypes: tuple[str, ...]
    with_gradients: bool = True


@dataclass(frozen=True)
class GradientState:
    """The contents of ``.grad`` after a call. ``call``: its number among the calls of the rank.

    ``values``: parameter -> the elements that are kept, as bytes of float64; b"" if it had none.
    Only those parameters whose gradients the call may have changed are among them.
    ``numbers``: the same for those of which the rank has only a part: which of the elements that
    are kept these are.
    """

    call: int
    values: Mapping[str, bytes]
    numbers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """``module_calls`` and ``states`` in their order.

    ``each``: so many elements of each gradient are kept in a state, of those in the sample of the
    check. ``complete``: False if something was left out, since there was too much of it.
    ``lines_run``: each line of the user's code that ran, in the order in which they ran first -> a
    number that says in which order they ran last. ``times_run``: how often each of them began.
    """

    module_calls: tuple[ModuleCall, ...] = ()
    states: tuple[GradientState, ...] = ()
    each: int = 0
    complete: bool = True
    lines_run: Mapping[CodeLine, int] | None = None
    times_run: Mapping[CodeLine, int] | None = None


def thinned(values: Tensor, most: int) -> Tensor:
    """At most about ``most`` elements of a flat tensor, at equal distances."""
    return values[:: distance_of(len(values), most)]


def distance_of(elements: int, most: int) -> int:
    """The distance of the elements that ``thinned`` keeps of so many."""
    # An odd stride visits the columns of a matrix in turn.
    return 1 if elements <= most else -(-elements // most) | 1


def packed(values: Tensor) -> bytes:
    """The elements of a flat tensor as bytes of float64."""
    return bytes_of(values.to("cpu", torch.float64).contiguous()).tobytes()


def unpacked(values: bytes) -> Tensor:
    """The elements again, shape (elements,)."""
    if not values:
        return torch.empty(0, dtype=torch.float64)
    return torch.frombuffer(bytearray(values), dtype=torch.float64)
