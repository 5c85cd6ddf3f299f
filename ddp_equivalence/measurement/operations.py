"""The operations of torch that a step ran on one rank, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.digest import bytes_of
from ddp_equivalence.measurement.calls import CodeLine


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

    @property
    def after(self) -> frozenset[int]:
        """The operations on which it depends directly."""
        return frozenset(writer for writer in self.writers if writer is not None)


@dataclass(frozen=True)
class DeafBackward:
    """A backward method of the user's own returned gradients that were computed without the one
    that it was given, although that is not 1. ``name``: the class of the function. ``inputs``: the
    numbers of the inputs that got them, from 0.
    """

    name: str
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class Operations:
    """All operations of a step, in their order.

    ``results``: the name of a gradient, or of an update -> the operation that wrote it last, and
    ``left``: the number of its value. ``complete``: False if there were too many operations to
    record them all. ``deaf``: the backward methods of the user's own that returned gradients which
    do not depend on the one that they were given.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    results: Mapping[str, int]
    left: Mapping[str, int]
    complete: bool
    deaf: tuple[DeafBackward, ...] = ()
