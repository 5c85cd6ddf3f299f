"""What is remembered of the lines of a step: which one made a tensor, a loss or other weights."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.measurement.gradient_watch import WeightWatch
from ddp_equivalence.measurement.graph_watch import GraphLines
from ddp_equivalence.measurement.lines import TensorOrigins

FIRST, SECOND, THIRD = (CodeLine("train.py", number) for number in (1, 2, 3))


def test_a_tensor_comes_from_the_line_that_first_held_it() -> None:
    origins = TensorOrigins()
    given = torch.ones(4)
    origins.after(sys._getframe(), None, None)
    part = given[:2]
    origins.after(sys._getframe(), FIRST, None)
    same = part
    batch = {"x": given[2:]}
    origins.after(sys._getframe(), SECOND, None)
    found = [origins.line_of(one) for one in (given, same, batch["x"], torch.ones(1))]
    assert found == [None, FIRST, SECOND, None]


def test_a_tensor_that_a_list_gets_later_comes_from_the_line_that_appended_it() -> None:
    origins = TensorOrigins()
    parts = [torch.ones(1)]
    origins.after(sys._getframe(), FIRST, None)
    parts.append(torch.ones(2))
    origins.after(sys._getframe(), SECOND, None)
    assert [origins.line_of(one) for one in parts] == [FIRST, SECOND]


def test_a_tensor_in_the_place_of_one_that_is_gone_has_a_line_of_its_own() -> None:
    origins = TensorOrigins()
    found = []
    for line in (FIRST, SECOND, THIRD):
        part: Tensor | None = torch.ones(8)
        origins.after(sys._getframe(), line, None)
        assert part is not None
        found.append(origins.line_of(part))
        part = None
    assert found == [FIRST, SECOND, THIRD]


def test_the_nodes_of_a_loss_come_from_the_lines_that_made_them() -> None:
    lines = GraphLines()
    weight = torch.ones(3, 3, requires_grad=True)
    outputs = weight.exp()
    lines.after(FIRST)
    variance = outputs.var(0)
    lines.after(SECOND)
    loss = variance.mean() + 1
    lines.after(THIRD)
    assert lines.of([loss], frozenset()) == {THIRD: "Add Mean", SECOND: "Var", FIRST: "Exp"}
    assert lines.of([loss], frozenset({SECOND})) == {THIRD: "Add Mean", SECOND: "Var"}


def test_weights_that_change_are_named_also_if_their_version_does_not() -> None:
    model = nn.Linear(2, 2)
    watch = WeightWatch(dict(model.named_parameters()))
    assert watch.changed(by_value=True)[0] == ()
    with torch.no_grad():
        model.bias.add_(1)
    names, first = watch.changed(by_value=False)
    assert names == ("bias",)
    model.weight.data.mul_(2)
    assert watch.changed(by_value=False)[0] == ()
    names, second = watch.changed(by_value=True)
    assert names == ("weight",)
    assert first != second


def test_parameters_that_are_frozen_are_named_once() -> None:
    model = nn.Linear(2, 2)
    watch = WeightWatch(dict(model.named_parameters()))
    model.bias.requires_grad_(False)
    assert watch.switched() == {False: ("bias",)}
    assert watch.switched() == {}
    model.bias.requires_grad_(True)
    model.weight.requires_grad_(False)
    assert watch.switched() == {False: ("weight",), True: ("bias",)}
