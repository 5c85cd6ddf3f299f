"""Which line last made or changed what a script trains with."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.in_script.kept_tensors import ModuleNames
from ddp_equivalence.observed_scripts.in_script.recorder import CHANGING, LastLines
from ddp_equivalence.observed_scripts.record import LastLine, Step


class Shuffled(DataLoader[Any]):
    """A class of a script's own, which calls torch's ``__init__``."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.ones(rows, 1), shuffle=True)  # type: ignore[arg-type]


class OfAll(SGD):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> LastLines:
    for _, kind, name in CHANGING:
        monkeypatch.setattr(kind, name, getattr(kind, name))  # so that it is put back
    return LastLines()


def source(place: CodeLine | None) -> str:
    assert place is not None
    return linecache.getline(place.file, place.number).strip()


def places_of(
    lines: LastLines, module: nn.Module, optimizer: Any = None, loader: Any = None
) -> Step:
    names = ModuleNames()
    names.modules["model"] = module
    return Step(last_lines=lines.of_step(optimizer, loader, names))


def test_what_a_class_of_the_script_makes_was_made_where_the_class_was_called(
    lines: LastLines,
) -> None:
    model = nn.Linear(1, 1)
    optimizer = OfAll(model)
    loader = Shuffled(3)
    found = places_of(lines, model, optimizer, loader)
    assert source(found.last_line(LastLine.MADE, "optimizer")) == "optimizer = OfAll(model)"
    assert source(found.last_line(LastLine.MADE, "loader")) == "loader = Shuffled(3)"


def test_what_was_made_inside_another_object_was_made_there(lines: LastLines) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader = Shuffled(3)

    found = places_of(lines, nn.Linear(1, 1), loader=Trainer().loader)
    assert source(found.last_line(LastLine.MADE, "loader")) == "self.loader = Shuffled(3)"


def test_the_last_line_counts_and_what_an_earlier_step_cleared_does_not(lines: LastLines) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    model[0].load_state_dict(model[0].state_dict())
    nn.DataParallel(model).zero_grad()
    lr_scheduler.ReduceLROnPlateau(optimizer).step(1.0)
    found = places_of(lines, model, optimizer)
    assert source(found.last_line(LastLine.LOADED, "optimizer")).endswith("(saved)")
    assert source(found.last_line(LastLine.LOADED, "model")).startswith("model[0].load")
    assert source(found.last_line(LastLine.CLEARED, "model")).endswith(".zero_grad()")
    assert source(found.last_line(LastLine.SCHEDULED, "optimizer")).endswith(".step(1.0)")
    assert places_of(lines, model).last_line(LastLine.CLEARED, "model") is None
