"""The calls of a step that matter for its gradients, each with the line of code that made it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, DistributedSampler

from ddp_equivalence.case.batch_tree import attributes_of
from ddp_equivalence.comparison.gradients import bytes_of
from ddp_equivalence.measurement.whole_tensors import is_flattened
from ddp_equivalence.ranks.importable import belongs_to_user

# The calls of a step that matter for its gradients, each with the line of code that made it.
#
# These are frozen dataclasses. The ranks send them to the judging process with an
# ``Observation``.


@dataclass(frozen=True)
class CodeLine:
    """A line of a file. ``function``: the name of the function that it stands in."""

    file: str
    number: int
    function: str = ""


class Kind(Enum):
    """What a call does."""

    WRAP = "wrap"
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    NO_SYNC = "no_sync"
    CLIP = "clip"
    ZERO_GRAD = "zero_grad"
    OPTIMIZER_STEP = "optimizer step"
    NEW_GROUP = "new group"
    SEED = "seed"
    SHUFFLE = "shuffle"
    SCALE = "scale"
    UNSCALE = "unscale"
    LOSS = "loss"
    SYNCHRONISATION = "synchronisation"
    HOOK = "communication hook"
    CHANGE = "change"
    READ = "read"
    LOSS_FUNCTIONS = "functions of the loss"
    MODULE = "module"
    SAMPLER = "sampler"
    LOADER = "loader"
    TENSOR_HOOK = "tensor hook"
    IGNORE = "ignore"
    WEIGHTS = "weights"
    REQUIRES_GRAD = "requires_grad"
    INDICES = "indices"
    POINT_TO_POINT = "point to point"
    MODULE_STATE = "state of a module"
    DRAW = "draw"
    BUFFERS = "buffers"
    SHARDING = "sharding"
    DROPPED = "dropped result"
    DIVIDE_FACTOR = "divide factor"


class Contents(Enum):
    """What the tensors of a collective are, beside what the model holds."""

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
    ``result_is_gone``: it writes its result to the tensor that went in, and when the line had run
    nothing held the memory of this tensor any longer. ``parts_of``: of contents that are something
    else, the parameters from whose gradients every element was taken, such as some rows of one.
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
    result_is_gone: bool = False
    parts_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class GradientChange:
    """What a line did to ``.grad`` of parameters, other than by a backward pass.

    ``names``: of the parameters. ``factor``: the number that they were multiplied by; None if it
    was something else. ``cleared``: they were set to None or to zero. ``exact``: False if the
    change was made after the line before this call's, and not later than this call's.
    """

    names: tuple[str, ...]
    factor: float | None = None
    cleared: bool = False
    exact: bool = True


@dataclass(frozen=True)
class HookState:
    """The state that DDP was given with a communication hook.

    ``kind``: its class. ``arguments``: those that the class takes, by name, in their order.
    ``asked``: the attributes of the state that stand in conditions of the hook.
    """

    kind: str
    arguments: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of a step.

    ``line``: the innermost line outside torch and this package; None if it is not known.
    ``users_line``: the innermost line of the user's own code; it differs from ``line`` where an
    installed package made the call. ``step``: the number of the step, from 0. ``backwards``: how
    many calls of backward had begun before in this step. ``value``: the loss of a backward, the
    norm or value of a clip, the seed (also of a sampler), or the scale. ``what``: the class of a
    wrapper or module, the function that clipped or shuffled, the class of an optimizer, the
    operation that made a loss, the functions that computed it, a sampler, loader or hook as text, a
    digest of the weights, what ``requires_grad`` was set to, or an attribute of a module with its
    new value. ``names``: the parameters that a clip, a zero_grad or an optimizer was given, or that
    changed; the names of modules.
    ``collective``, ``change`` and ``hook_state``: of calls of these kinds. ``ranks``: of a new
    group.
    ``in_backward``: the call was made while a backward pass ran. ``chosen_at``: of a forward pass,
    the line of the user's that named the module; functions that were given it come below. Of a
    loader, where the length of a data set of the user's own begins.
    ``examples``: the positions, in the batch of all steps, that a forward pass read; () if they are
    not known. ``line`` of these is the one that first held what was read.

    A ``LOSS`` is a scalar with a gradient that a line has made: ``value`` is its value. A
    ``LOSS_FUNCTIONS`` is a line that computed a part of the loss at which backward begins. A
    ``SYNCHRONISATION`` is a line after which DDP's flag ``require_backward_grad_sync`` had another
    ``value``, 0 or 1. A ``HOOK`` is a communication hook that DDP was given, and ``what`` its name;
    a ``TENSOR_HOOK`` is one on a parameter or a module. A ``DRAW`` is a line under which ``what``,
    such as torch, drew random numbers: ``value`` is 1 in a forward pass of the model, else 0.
    ``made_at``: where the loss of a backward
    was computed, where the function of a hook or the sampler of a loader begins, or which line
    first held the tensor that went into a collective, if that is known. A ``POINT_TO_POINT`` sends
    a tensor to one rank or receives one, and ``what`` is the function. An ``INDICES`` is a line
    that gave the variable ``what`` a list of whole numbers, ``examples``. ``callers``: the user's
    lines that led to a collective, a ``POINT_TO_POINT``, ``no_sync``, a backward, a clip, a
    zero_grad, a new group or a change of gradients or weights: those behind ``users_line``, the
    innermost first. ``numbers``: those that the state of a communication hook held as attributes,
    by name. ``norm``: what a clip by the norm found, before it clipped; None if that is not known.
    A ``SHARDING`` gave the parameters ``names`` to ``what``, such as fully_shard.
    ``ranks`` of it, and of a wrapper: among which gradients are reduced; () if that is not known.
    A ``DIVIDE_FACTOR`` set the number by which FSDP divides the gradients of one module: ``value``.
    A ``DROPPED`` is a line of a hook that gave the variable ``what`` a tensor which nothing held
    when the hook had returned None, and ``names`` the function that registered it.
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
    hook_state: HookState | None = None


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
    """What an object holds; None if it is not opened."""
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


# Reads what decides in a communication hook: the attributes of its state that it asks.

ASKING = (ast.If, ast.While, ast.IfExp)


def owner_of_numbers(hook: object, state: object) -> object:
    """The object whose numbers a hook may ask: its state, or what it is a method of."""
    if _has_attributes(state):
        return state
    bound = getattr(_called(hook), "__self__", None)
    return bound if _has_attributes(bound) else None


def state_of_hook(hook: object, state: object) -> HookState | None:
    """What is known of this object; None if it is no object with attributes."""
    owner = owner_of_numbers(hook, state)
    if owner is None:
        return None
    first = 0 if owner is not state or not inspect.ismethod(_called(hook)) else 1
    return HookState(type(owner).__name__, _arguments_of(type(owner)), _asked_in(hook, first))


def _called(hook: object) -> object:
    """The function or method that runs when a hook is called."""
    return hook if inspect.isroutine(hook) else getattr(hook, "__call__", hook)  # noqa: B004


def attributes_of_hook(owner: object) -> dict[str, Any]:
    """The attributes of an object, also those in slots."""
    slots = [name for kind in type(owner).__mro__ for name in getattr(kind, "__slots__", ())]
    found = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
    return {**found, **getattr(owner, "__dict__", {})}


def _has_attributes(owner: object) -> bool:
    if inspect.isclass(owner) or inspect.isroutine(owner) or inspect.ismodule(owner):
        return False
    return hasattr(owner, "__dict__") or bool(getattr(type(owner), "__slots__", ()))


def _arguments_of(kind: type) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        return ()


def _asked_in(hook: object, argument: int) -> tuple[str, ...]:
    """The attributes of an argument of a hook, with this number, that its conditions name."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(_called(hook))))  # type: ignore[arg-type]
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return ()
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ()
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    asked = (one for name in names[argument : argument + 1] for one in _asked(function, name))
    return tuple(dict.fromkeys(asked))


def _asked(function: ast.AST, state: str) -> Iterator[str]:
    for node in ast.walk(function):
        for part in ast.walk(node.test) if isinstance(node, ASKING) else ():
            base = part.value if isinstance(part, ast.Attribute) else None
            if isinstance(part, ast.Attribute) and isinstance(base, ast.Name) and base.id == state:
                yield part.attr


# The functions of torch that say which examples a rank gets, or what DDP does with gradients.

Described = tuple[Kind, str, float]
"""The kind of the call, the call as text, and a number that it is about."""


def _sampler(frame: FrameType) -> Described:
    """The number is the length of the data set."""
    values = frame.f_locals
    count, rank = values.get("num_replicas"), values.get("rank")
    shown = (
        f"num_replicas={dist.get_world_size() if count is None else count}, "
        f"rank={dist.get_rank() if rank is None else int(rank)}, "
        f"shuffle={values.get('shuffle')}, drop_last={values.get('drop_last')}"
    )
    return Kind.SAMPLER, f"{_class_of(values)}({shown})", _length(values.get("dataset"))


def _loader(frame: FrameType) -> Described:
    """The number is the length of the data set."""
    values = frame.f_locals
    shown = [f"batch_size={values.get('batch_size')}"]
    if values.get("sampler") is not None:
        shown.append(f"sampler={type(values['sampler']).__name__}")
    if values.get("batch_sampler") is not None:
        shown = [f"batch_sampler={type(values['batch_sampler']).__name__}"]
    shown += [f"{name}=True" for name in ("shuffle", "drop_last") if values.get(name)]
    text = f"{_class_of(values)}({', '.join(shown)})"
    return Kind.LOADER, text, _length(values.get("dataset"))


def own_sampler(frame: FrameType) -> CodeLine | None:
    """Where a class of the user's, which gives a loader its order, begins to do so."""
    for name in ("sampler", "batch_sampler"):
        sampler = frame.f_locals.get(name)
        line = beginning_of(getattr(type(sampler), "__iter__", None))
        if line is not None:
            return line
    return None


def own_length(frame: FrameType) -> CodeLine | None:
    """Where a data set of the user's class, which a loader was given, says how long it is."""
    return beginning_of(getattr(type(frame.f_locals.get("dataset")), "__len__", None))


def _ignoring(frame: FrameType) -> Described:
    """The number is how many parameters and buffers DDP is to ignore."""
    names = frame.f_locals.get("params_and_buffers_to_ignore", ())
    return Kind.IGNORE, "_set_params_and_buffers_to_ignore_for_model", _length(names)


def _class_of(values: dict[str, Any]) -> str:
    return type(values["self"]).__name__


def _length(data: Any) -> float:
    try:
        return float(len(data))
    except TypeError:  # a data set that is only iterated
        return 0.0


DATA_FUNCTIONS: dict[CodeType, Callable[[FrameType], Described]] = {
    DistributedSampler.__init__.__code__: _sampler,
    DataLoader.__init__.__code__: _loader,
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model.__code__: _ignoring,
}


# The operations of torch that a step ran on one rank, as data.


@dataclass(frozen=True)
class Value:
    """What a tensor held. ``elements``: as bytes of float64. ``dtype``: of the tensor itself."""

    shape: tuple[int, ...]
    dtype: str
    elements: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        """The values of a plain tensor."""
        flat = tensor.detach().to("cpu", torch.float64).contiguous().reshape(-1)
        name = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), name, bytes_of(flat).tobytes())

    @property
    def tensor(self) -> Tensor:
        """The values again, of dtype float64."""
        if not self.elements:
            return torch.empty(self.shape, dtype=torch.float64)
        return torch.frombuffer(bytearray(self.elements), dtype=torch.float64).reshape(self.shape)

    @property
    def is_floating_point(self) -> bool:
        return "float" in self.dtype


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
    record them all.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    results: Mapping[str, int]
    left: Mapping[str, int]
    complete: bool


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
    """What ``.grad`` held after a call. ``call``: its number among the calls of the rank.

    ``values``: parameter -> the elements that are kept, as bytes of float64; b"" if it had none.
    Only those parameters whose gradients the call may have changed are among them.
    """

    call: int
    values: Mapping[str, bytes]


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
