"""The calls of a step that matter for its gradients, each with the line of code that made it.

These are frozen dataclasses. The ranks send them to the judging process with an ``Observation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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

    A ``LOSS`` is a scalar with a gradient that a line has made: ``value`` is its value, ``names``
    the parameters that it reaches, if that is known. A
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
