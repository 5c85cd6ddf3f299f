"""The tensors in the arguments of a call are found however they are packed."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import tensors_in


class WithSlot:
    __slots__ = ("rows",)

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Inherits(WithSlot):
    __slots__ = ("targets",)


def test_a_tensor_in_an_inherited_slot_is_found() -> None:
    rows = torch.ones(2)
    assert [id(tensor) for tensor in tensors_in([Inherits(rows)])] == [id(rows)]
