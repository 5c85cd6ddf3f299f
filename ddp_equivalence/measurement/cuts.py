"""Lines of a step at which a gradient ends, as data that the ranks send to the judging process."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.trace import TensorSample


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
