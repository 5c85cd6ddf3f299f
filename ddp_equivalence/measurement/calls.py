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
    SCALE = "scale"
    UNSCALE = "unscale"
    CHANGE = "change"
    HOOK = "hook"


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
    """

    op: str
    reduce_op: str
    ranks: tuple[int, ...]
    elements: int
    contents: Contents
    names: tuple[str, ...] = ()
    factor: float = 1.0
    asynchronous: bool = False


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
class Call:
    """One call of a step.

    ``line``: the innermost line outside torch and this package; None if it is not known.
    ``users_line``: the innermost line of the user's own code; it differs from ``line`` where an
    installed package made the call. ``step``: the number of the step, from 0. ``backwards``: how
    many calls of backward had begun before. ``value``: the loss of a backward, the norm or value of
    a clip, the seed, or the scale. ``what``: the class of a wrapper or module, the function that
    clipped or that registered a hook, or the class of an optimizer. ``names``: the parameters that
    a clip, a zero_grad, a hook or an optimizer was given. ``collective`` and ``change``: of calls
    of these kinds. ``ranks``: of a new group. ``in_backward``: the call was made while a backward
    pass ran. ``made_at``: where the loss of a backward was computed, or where the function of a
    hook begins, if that is known.
    """

    kind: Kind
    line: CodeLine | None
    users_line: CodeLine | None
    step: int
    backwards: int
    value: float | None = None
    what: str = ""
    names: tuple[str, ...] = ()
    collective: CollectiveCall | None = None
    change: GradientChange | None = None
    ranks: tuple[int, ...] = ()
    in_backward: bool = False
    made_at: CodeLine | None = None
