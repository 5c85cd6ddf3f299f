"""Values that a watched step had on its way: outputs of modules, and gradients after each change.

Only samples are kept, as bytes, so that they may travel by the hundred to the judging process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.digest import bytes_of
from ddp_equivalence.measurement.calls import CodeLine

MOST_OF_A_TENSOR = 64
"""So many elements of a module's input or output are kept, at equal distances."""


@dataclass(frozen=True)
class TensorSample:
    """Some elements of a tensor. ``values``: as float64. ``dtype``: of the tensor itself."""

    shape: tuple[int, ...]
    dtype: str
    values: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSample:
        """A sample of a plain tensor."""
        kept = thinned(tensor.detach().reshape(-1), MOST_OF_A_TENSOR)
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), packed(kept))


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, outside of backward passes.

    ``name``: "" for the model itself. ``kind``: its class. ``backwards``: how many calls of
    backward had begun before. ``line``: the line that called it, of the user's code. ``given`` and
    ``returned``: the first tensor of floating-point numbers in each; None if there is none.
    ``order``: (when it began, when it ended), counted over all modules. ``training``: its mode.
    ``with_gradients``: False if it was called where gradients are turned off,
    ``off_at``: by this line, if it is known.
    """

    name: str
    kind: str
    step: int
    backwards: int
    line: CodeLine | None
    given: TensorSample | None
    returned: TensorSample | None
    order: tuple[int, int]
    training: bool
    with_gradients: bool = True
    off_at: CodeLine | None = None


@dataclass(frozen=True)
class GradientState:
    """What ``.grad`` held after a call. ``call``: its number among the calls of the rank.

    ``values``: parameter -> the elements that are kept, as bytes of float64; b"" if it had none.
    Only those parameters whose gradients the call may have changed are among them.
    """

    call: int
    values: Mapping[str, bytes]


@dataclass(frozen=True)
class LocalTensor:
    """Some elements of a tensor that a line of the user's code has made or changed.

    ``name``: that the code has for it, such as ``flat``, ``parts[0]`` or ``self.buffer``; "" for
    what the line returned. ``values``: as bytes of float64, at equal distances. ``elements``: so
    many it has in all.
    """

    step: int
    line: CodeLine
    name: str
    values: bytes
    elements: int


@dataclass(frozen=True)
class Trace:
    """``module_calls`` in the order in which they ended, and ``states`` in their order.

    ``each``: so many elements of each gradient are kept in a state, of those in the sample of the
    check. ``complete``: False if something was left out, since there was too much of it.
    ``lines_run``: each line of the user's code that ran, in the order in which they ran first -> a
    number that says in which order they ran last. ``times_run``: how often each of them began.
    ``local_tensors``: in the order in which lines made them, once a backward pass had run.
    """

    module_calls: tuple[ModuleCall, ...] = ()
    states: tuple[GradientState, ...] = ()
    each: int = 0
    complete: bool = True
    lines_run: Mapping[CodeLine, int] | None = None
    times_run: Mapping[CodeLine, int] | None = None
    local_tensors: tuple[LocalTensor, ...] = ()


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
