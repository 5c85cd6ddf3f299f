"""What the names in a user's functions held is kept, and nothing of keeping it is recorded."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ddp_equivalence.measurement.calls import Held, NameAt, Value
from ddp_equivalence.measurement.names_held import MOST_TIMES, NamesHeld
from ddp_equivalence.measurement.operation_log import OperationLog

pytestmark = pytest.mark.self_check

WIDE = torch.zeros(2000)
HEAD = nn.Linear(2, 1)


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, count: Any) -> None:
        self.total += count
        kept = count  # noqa: F841  # it is read by the recorder


def watched(*counts: Any) -> dict[str, tuple[Held, ...]]:
    """What the names in ``Counter.add`` held, where it was called with each count."""
    counter, names = Counter(), NamesHeld()
    with names.watching():
        for one in counts:
            counter.add(one)
    begins = inspect.getsourcelines(Counter.add)[1]
    found = {at: held for at, held in names.found.items() if at.begins == begins}
    assert {at.file for at in found} == {__file__}
    return {at.name: held for at, held in found.items()}


def test_every_call_leaves_what_its_names_and_attributes_of_self_held() -> None:
    held = watched(3, 5)
    assert held["kept"] == (3, 5)
    assert held["self.total"] == (3, 8)
    assert held["self"] == (..., ...)


def test_only_so_many_calls_are_kept() -> None:
    assert watched(*range(MOST_TIMES + 4))["kept"] == tuple(range(MOST_TIMES))


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (None, None),
        ("mean", "mean"),
        (True, True),
        (torch.tensor(2), Value.of(torch.tensor(2))),
        (WIDE, ...),
        (torch.zeros(2, dtype=torch.complex64), ...),
        (object(), ...),
        (HEAD, "Linear"),
        ({"kl": 0.5, 1: (2, 3)}, (("kl", 0.5), ("1", (("0", 2), ("1", 3))))),
        ([[[1]]], (("0", (("0", ...),)),)),
        ({HEAD: 1}, ...),
        (list(range(100)), ...),
    ],
)
def test_numbers_small_tensors_and_what_holds_them_are_kept(value: Any, held: Held) -> None:
    names = NamesHeld()

    def holds() -> None:
        kept = value  # noqa: F841

    with names.watching():
        holds()
    at = NameAt(__file__, inspect.getsourcelines(holds)[1], "kept")
    assert names.found[at] == (held,)


def test_no_log_of_operations_has_what_reads_the_names() -> None:
    def doubled(rows: Any) -> Any:
        twice = rows * 2
        return (twice,)

    names = NamesHeld()
    with OperationLog() as log, names.watching():
        doubled(torch.ones(3))
    assert [one.name for one in log.found({}).operations] == ["ones", "mul"]
    at = NameAt(__file__, inspect.getsourcelines(doubled)[1], "twice")
    assert names.found[at] == (Value.of(torch.full((3,), 2.0)),)


def test_a_log_leaves_the_trace_of_the_thread_to_others() -> None:
    with OperationLog():
        assert sys.gettrace() is None
