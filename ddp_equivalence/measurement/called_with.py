"""Records what a rank's model was called with, so that ranks that do the same work are noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch_tree import tensors_of
from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.gradients import dense
from ddp_equivalence.measurement.module_calls import heard
from ddp_equivalence.measurement.plain_tensors import leaves_of, plain, tensors_in
from ddp_equivalence.measurement.unordered_rows import UnorderedRows, row_hashes


class CalledWith:
    """Records everything that the model is called with, and the gradients of what it returns.

    ``given``: what the rank was given. ``in_any_order``: neither the order of the examples counts
    nor how they are divided among calls. The step takes its examples itself, and ranks that read
    all of them in different orders do the same work. Calls without gradients are left out: they
    take no part in the step's gradient.
    """

    def __init__(self, given: Sequence[object], in_any_order: bool = False) -> None:
        self._given = [
            leaf
            for leaf in tensors_of(given)
            if leaf.layout == torch.strided and not leaf.is_nested and leaf.numel()
        ]
        self._rows = UnorderedRows() if in_any_order else None
        self._memory = {leaf.untyped_storage().data_ptr() for leaf in self._given}
        self._seen: list[str] = []
        self._called = False
        self._gradients = torch.zeros(4, dtype=torch.float64)
        self._is_known = True
        self.given_rows = False
        """True once the model was called with a copy of the first row of something that was dealt
        to the rank."""

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record the calls of this model inside the block."""
        with heard(model, self._listen):
            yield

    @property
    def arguments(self) -> str | None:
        """A hash of all arguments; None if the model was never called, or not all are known."""
        if not (self._called and self._is_known):
            return None
        return " ".join(self._seen) if self._rows is None else str(self._rows)

    @property
    def came_back(self) -> tuple[float, ...]:
        """Sums of the gradients of what the model returned, of their absolute values and squares,
        and of them times a number that goes with the row of the input. None of these depends on the
        order of the examples.
        """
        return tuple(self._gradients.tolist())

    def _listen(self, arguments: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():
            return None
        self._called = True
        self._is_known, known = False, self._is_known  # in case a tensor is not plain
        tensors = tensors_in(arguments)
        if self._rows is not None:
            self._rows.add([dense(tensor) for tensor in tensors])
        elif any(map(self._is_given, tensors)):
            self._is_known = known
            self._seen.append(_digest(tensors))
            return None  # examples that were dealt to the rank: other ranks have others
        else:
            self._seen.append(_digest(tensors))
            self.given_rows = self.given_rows or any(map(self._holds_a_given_row, tensors))
        self._is_known = known
        rows = next((dense(one) for one in tensors if one.ndim), torch.empty(0))
        return partial(self._returned, _numbers_of(rows))

    def _returned(self, numbers: Tensor, result: object) -> None:
        for leaf in leaves_of(result):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                plain(leaf).register_hook(partial(self._came_back, numbers))

    def _came_back(self, numbers: Tensor, gradient: Tensor) -> None:
        """Add up the gradient of what the model returned. ``numbers``: one for every input row."""
        try:
            values = dense(plain(gradient)).to("cpu", torch.float64)
            by_row = values.reshape(len(values), -1).sum(1) if values.ndim else values.reshape(1)
            if len(numbers) != len(by_row):  # rows of the output do not belong to rows of the input
                numbers = _numbers_of(torch.arange(len(by_row)))
            sums = (values.sum(), values.abs().sum(), values.square().sum(), numbers @ by_row)
            self._gradients += torch.stack(sums)
        except Exception:  # never fail in the user's backward pass
            self._is_known = False

    def _is_given(self, tensor: Tensor) -> bool:
        """True if the tensor shares its memory with one that the rank was given."""
        if tensor.layout != torch.strided or not tensor.numel():
            return False
        return tensor.untyped_storage().data_ptr() in self._memory

    def _holds_a_given_row(self, tensor: Tensor) -> bool:
        """True if a row of the tensor is the first row that the rank was given."""
        if tensor.layout != torch.strided or not tensor.ndim or not tensor.numel():
            return False
        rows = tensor.detach().reshape(len(tensor), -1)
        return any(
            bool((rows == leaf[0].reshape(-1).to(rows.dtype)).all(1).any())
            for leaf in self._given
            if leaf[0].numel() == rows.shape[1]
        )


def _digest(tensors: Sequence[Tensor]) -> str:
    return digest((str(place), one) for place, one in enumerate(tensors))


def _numbers_of(rows: Tensor) -> Tensor:
    """A number from 0 to 1 for every row, which follows from its bytes alone."""
    return torch.from_numpy(row_hashes(rows) / 2.0**64)
