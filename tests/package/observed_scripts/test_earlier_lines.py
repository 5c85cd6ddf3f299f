"""Which lines made an optimizer or a loader."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import DataLoader

from ddp_equivalence.measurement.calls import CodeLine
from ddp_equivalence.observed_scripts.in_script.kept_tensors import ModuleNames
from ddp_equivalence.observed_scripts.in_script.watch import EarlierLines
from ddp_equivalence.observed_scripts.recorded_step import Step

WATCHED = (
    (Optimizer, ("__init__",)),
    (DataLoader, ("__init__",)),
    *(
        (one, ("step",))
        for one in vars(lr_scheduler).values()
        if "step" in getattr(one, "__dict__", ())
    ),
)


class Shuffled(DataLoader[Any]):
    """A class of a script's own, which calls torch's ``__init__``."""

    def __init__(self, rows: int) -> None:
        super().__init__(torch.ones(rows, 1), shuffle=True)  # type: ignore[arg-type]


class OfAll(SGD):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.parameters(), lr=0.1)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> EarlierLines:
    for kind, names in WATCHED:
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))  # so that it is put back
    return EarlierLines()


def source(place: CodeLine | None) -> str:
    assert place is not None
    return linecache.getline(place.file, place.number).strip()


def places_of(
    lines: EarlierLines, module: nn.Module, optimizer: Any = None, loader: Any = None
) -> Step:
    names = ModuleNames()
    names.modules["model"] = module
    return Step(**lines.known(optimizer, loader, names))


def test_what_a_class_of_the_script_makes_was_made_where_the_class_was_called(
    lines: EarlierLines,
) -> None:
    model = nn.Linear(1, 1)
    optimizer = OfAll(model)
    loader = Shuffled(3)
    found = places_of(lines, model, optimizer, loader)
    assert source(found.optimizer_made) == "optimizer = OfAll(model)"
    assert source(found.loader_made) == "loader = Shuffled(3)"


def test_what_was_made_inside_another_object_was_made_there(lines: EarlierLines) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader = Shuffled(3)

    found = places_of(lines, nn.Linear(1, 1), loader=Trainer().loader)
    assert source(found.loader_made) == "self.loader = Shuffled(3)"
