"""Marks of what modules return."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_equivalence.observed_scripts.in_script.kept_tensors import MOST_ELEMENTS, mark_of


def test_a_mark_depends_on_values_and_on_their_order() -> None:
    values = torch.nn.functional.normalize(torch.randn(8, 4), dim=1)
    assert mark_of({"out": values}) == mark_of([values.clone()])
    assert mark_of(values) != mark_of(values.flip(0))
    assert mark_of(values) != mark_of(-values)
    assert mark_of((values, values[:1])) != mark_of(values)


def test_a_change_of_many_elements_changes_the_mark_of_a_large_tensor() -> None:
    large = torch.ones(3 * MOST_ELEMENTS + 1, dtype=torch.bfloat16)
    changed = large.clone()
    changed[: MOST_ELEMENTS // 2] = 2
    assert mark_of(changed) != mark_of(large)


def test_what_has_no_dense_floats_has_no_mark() -> None:
    sparse = torch.eye(3).to_sparse()
    for one in (None, 3.5, torch.arange(3), torch.ones(0), sparse):
        assert math.isnan(mark_of(one))


class Refuses(TorchDispatchMode):
    """Lets no operation of torch run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def test_no_mode_of_the_script_sees_what_is_computed_for_a_mark() -> None:
    values = torch.ones(3).detach()
    with Refuses():  # type: ignore[no-untyped-call]
        assert not math.isnan(mark_of(values))
