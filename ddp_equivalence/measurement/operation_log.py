"""Records the operations of torch that a step runs, with their values and their lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.measurement.calls import (
    NotPlain,
    Operation,
    Operations,
    Value,
    lines_of,
    plain,
)
from ddp_equivalence.measurement.draws import draws_numbers, name_of_operation
from ddp_equivalence.measurement.observer import backward_on_calling_thread
from ddp_equivalence.ranks.users_line import users_line

# A step without a known cause runs like this once on its ranks and once on one rank alone: the
# first operation whose result one rank does not have shows where they part. Source:
# pytorch.org/docs/stable/notes/extending.html, "Extending all torch API with Modes".

MOST_OPERATIONS = 20_000
MOST_ELEMENTS = 100_000
MOST_BYTES = 256 * 1024**2
"""A step with more operations, larger tensors or more values is not recorded to its end."""

MOST_KEPT = 2 * 1024**3
"""Bytes. What the step would have freed is kept while it is recorded; with more, recording ends."""

COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of operations that talk to other ranks. Their tensors are read and written."""

BETWEEN_TWO = ("send", "recv_", "recv_any_source_")
"""Collectives of two ranks. To wait for one at once may be to wait forever."""

UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Operations that return memory which nothing was written to."""

SCALING = ("mul", "mul_", "div", "div_")
"""Operations that may multiply or divide by a number of Python."""


class OperationLog(TorchDispatchMode):
    """Records what runs inside the block. Ask ``found`` afterwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._operations: list[Operation] = []
        self._values: dict[Value, int] = {}
        self._writer: dict[int, int] = {}  # address of a storage -> the last operation to write it
        self._unwritten: set[int | None] = set()  # addresses of storages
        self._kept: list[object] = []  # storages stay, so that no address stands for two of them
        self._bytes = self._bytes_kept = 0
        self._complete = True
        self._watching: list[ExitStack] = []

    def __enter__(self) -> Self:
        self._watching.append(ExitStack())
        self._watching[-1].enter_context(backward_on_calling_thread())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not type it
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watching.pop().close()

    def found(self, results: Mapping[str, Tensor | None]) -> Operations:
        """The operations that ran. ``results``: the tensors for whose sake they ran, by name."""
        left = {
            name: number
            for name, tensor in results.items()
            if tensor is not None and (number := self._number_of_value(tensor)) is not None
        }
        return Operations(
            operations=tuple(self._operations),
            values=tuple(self._values),
            left=left,
            results={
                name: writer
                for name, tensor in results.items()
                if tensor is not None and (writer := self._last_writer(tensor)) is not None
            },
            complete=self._complete,
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = list(_tensors((args, kwargs))) if self._complete else []
        read = self._noted(given)
        writers = tuple(map(self._last_writer, given))
        flags = [(one.requires_grad, one.is_leaf) for one in given]
        result = function(*args, **(kwargs or {}))
        if self._complete:
            try:
                numbers = _numbers(function, args)
                draws = draws_numbers(function, args, kwargs or {})
                self._record(function, given, read, writers, result, numbers, flags, draws)
            except NotPlain:
                self._end()
        return result

    def _end(self) -> None:
        """Record no more; no address has to stand for one storage from here on."""
        self._complete = False
        self._kept.clear()

    def _record(
        self,
        function: Any,
        given: list[Tensor],
        read: tuple[int | None, ...],
        writers: tuple[int | None, ...],
        result: Any,
        numbers: tuple[float, ...],
        flags: list[tuple[bool, bool]],
        draws: bool,
    ) -> None:
        name = name_of_operation(function)
        talks = function.namespace in COLLECTIVES
        returned = list(_tensors(result))
        written = given if talks or function._schema.is_mutable else []
        if talks and name not in BETWEEN_TWO:
            _wait_for(result)
        number = len(self._operations)
        self._unwritten.difference_update(map(_address, written))
        for tensor in [*returned, *written]:
            self._keep(tensor, number)
        if name in UNWRITTEN:
            self._unwritten.update(map(_address, returned))
        left = () if name in BETWEEN_TWO else self._noted(given if talks else returned)
        _, line = lines_of(sys._getframe(2))
        lost = any(required and not leaf for required, leaf in flags)
        self._operations.append(
            Operation(
                name=name,
                line=line,
                given=read,
                returned=left,
                writers=writers,
                talks=talks,
                draws=draws,
                differentiable=any(required for required, _ in flags),
                in_backward=torch._C._current_graph_task_id() != -1,
                numbers=numbers,
                loses_gradient=talks and torch.is_grad_enabled() and lost,
                required=tuple(required for required, _ in flags),
                leaves=tuple(leaf for _, leaf in flags),
                recorded=torch.is_grad_enabled(),
            )
        )
        too_many = self._bytes > MOST_BYTES or self._bytes_kept > MOST_KEPT
        if number + 1 >= MOST_OPERATIONS or too_many:
            self._end()

    def _noted(self, tensors: Iterable[Tensor]) -> tuple[int | None, ...]:
        """The numbers of the tensors' values; None for a tensor without values of its own."""
        return tuple(map(self._number_of_value, tensors))

    def _number_of_value(self, tensor: Tensor) -> int | None:
        try:
            tensor = plain(tensor)
        except NotPlain:
            return None
        if _address(tensor) in self._unwritten:
            return None
        if tensor.numel() > MOST_ELEMENTS or tensor.is_complex() or tensor.is_sparse:
            return None
        value = Value.of(tensor)
        if value not in self._values:
            self._bytes += len(value.elements)
        return self._values.setdefault(value, len(self._values))

    def _keep(self, tensor: Tensor, number: int) -> None:
        address = _address(tensor)
        if address is not None:
            if address not in self._writer:
                self._kept.append(tensor.untyped_storage())
                self._bytes_kept += tensor.untyped_storage().nbytes()
            self._writer[address] = number

    def _last_writer(self, tensor: Tensor) -> int | None:
        address = _address(tensor)
        return None if address is None else self._writer.get(address)


def _numbers(function: Any, arguments: tuple[Any, ...]) -> tuple[float, ...]:
    """The numbers of Python by which an operation multiplies or divides."""
    if name_of_operation(function) not in SCALING:
        return ()
    numbers = (one for one in arguments if type(one) in (int, float))
    return tuple(map(float, numbers))


def _tensors(values: object) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _address(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _wait_for(result: object) -> None:
    """Wait until a collective is done, so that its values are there to be recorded.

    A synchronous collective of NCCL has waited itself, and returns a null pointer, on which a call
    of ``wait`` would end the process.
    """
    for leaf in pytree.tree_leaves(result):
        is_work = isinstance(leaf, torch.ScriptObject) and hasattr(leaf, "wait")
        if is_work and dist.Work.unbox(leaf) is not None:
            leaf.wait()


# Sees in which precision a step computes: where it enters autocast, and where it uses float32.

Autocast = tuple[str, torch.dtype]
"""The device type and the dtype of an autocast region."""


@contextmanager
def autocast_entered() -> Iterator[set[Autocast]]:
    """Collect, inside the block, the autocast regions that code with gradients enters.

    What runs without gradients, such as an evaluation on one rank, does not count.
    """
    entered: set[Autocast] = set()
    enter: Callable[[Any], Any] = torch.autocast.__enter__

    def recording(autocast: Any) -> Any:
        if autocast._enabled and torch.is_grad_enabled():
            entered.add((autocast.device, autocast.fast_dtype))
        return enter(autocast)

    torch.autocast.__enter__ = recording  # type: ignore[method-assign]
    try:
        yield entered
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]


class Float32Watch(TorchDispatchMode):
    """Notes the first operation inside the block that takes values in float32 into float64.

    Whole numbers do not count, since float32 rounds none of them: they are masks, flags or counts.

    ``found``: the operation and the line of the user's code that called it; "" if there was none.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.found = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.found and _enters_float64(result, (args, kwargs)):
            name = str(function).partition(".")[2].partition(".")[0] or str(function)
            line = users_line(sys._getframe(1))
            self.found = f"{name} at {line}" if line else name
        return result


def _enters_float64(result: object, arguments: object) -> bool:
    """True if the result is in float64 although an argument was rounded to float32."""
    return any(map(_is_float64, pytree.tree_leaves(result))) and any(
        map(_is_rounded_to_float32, pytree.tree_leaves(arguments))
    )


def _is_float64(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64


def _is_rounded_to_float32(value: object) -> bool:
    if not isinstance(value, Tensor) or value.dtype is not torch.float32:
        return False
    return bool((value != value.round()).any())
