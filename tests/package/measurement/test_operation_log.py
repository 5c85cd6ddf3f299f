"""The operations of torch are recorded with their values, their lines and what they depend on."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

from ddp_equivalence.measurement.calls import Operations
from ddp_equivalence.measurement.operation_log import OperationLog


def recorded(results: tuple[str, ...] = (), **most: int) -> tuple[Operations, nn.Linear]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    rows = torch.randn(4, 3)
    log = OperationLog(**most)
    with log:
        filled = torch.empty(4, 2)
        filled.copy_(layer(rows))  # written
        torch.rand(2)
        filled.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return log.found({name: gradients[name] for name in results}), layer


def test_the_line_and_the_values_of_an_operation_are_recorded() -> None:
    found, layer = recorded()
    (copied,) = [one for one in found.operations if one.name == "copy_"]
    assert copied.line is not None
    assert linecache.getline(copied.line.file, copied.line.number).rstrip().endswith("# written")
    assert copied.returned[0] is not None
    torch.manual_seed(0)
    nn.Linear(3, 2)
    expected = layer(torch.randn(4, 3)).detach().double()
    assert torch.equal(found.values[copied.returned[0]].tensor, expected)
    assert found.complete


def test_memory_that_nothing_was_written_to_has_no_value() -> None:
    found, _ = recorded()
    (empty,) = [one for one in found.operations if one.name == "empty"]
    assert empty.returned == (None,)


def test_what_runs_in_backward_and_what_draws_is_known() -> None:
    found, _ = recorded()
    in_backward = {one.name for one in found.operations if one.in_backward}
    assert "mm" in in_backward
    assert "addmm" not in in_backward
    assert {one.name for one in found.operations if one.draws} == {"rand"}
    (multiplied,) = [one for one in found.operations if one.name == "addmm"]
    assert multiplied.differentiable


def test_a_gradient_depends_on_the_operations_of_the_forward_pass() -> None:
    found, layer = recorded(("weight",))
    weight = layer.weight.grad
    assert weight is not None
    assert torch.equal(found.values[found.left["weight"]].tensor, weight.double())
    behind, open_ones = set[int](), [found.results["weight"]]
    while open_ones:
        number = open_ones.pop()
        behind.add(number)
        open_ones.extend(found.operations[number].after - behind)
    names = {found.operations[number].name for number in behind}
    assert {"copy_", "addmm", "mm"} <= names
    assert "rand" not in names


def test_too_many_operations_are_not_recorded_to_the_end() -> None:
    found, _ = recorded(most_operations=3)
    assert not found.complete
    assert len(found.operations) == 3


def test_too_many_values_are_not_recorded_to_the_end() -> None:
    found, _ = recorded(most_bytes=100)
    assert not found.complete
    assert 0 < len(found.operations) < len(recorded()[0].operations)


def test_what_is_kept_of_a_step_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_equivalence.measurement.operation_log.MOST_KEPT", 100)
    found, _ = recorded()
    assert not found.complete
    with OperationLog() as log:
        torch.ones(100) + 1
    assert not log._kept
