"""Which lines made an optimizer or a loader, loaded weights, and cleared gradients."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import DataLoader

from ddp_equivalence.observed_scripts.in_script.kept_tensors import ModuleNames
from ddp_equivalence.observed_scripts.in_script.watch import EarlierLines
from ddp_equivalence.observed_scripts.recorded_step import EarlierPlaces, Place

WATCHED = (
    (Optimizer, ("__init__", "load_state_dict", "zero_grad")),
    (DataLoader, ("__init__",)),
    (nn.Module, ("load_state_dict", "zero_grad")),
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


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> EarlierLines:
    for kind, names in WATCHED:
        for name in names:
            monkeypatch.setattr(kind, name, getattr(kind, name))  # so that it is put back
    return EarlierLines()


def source(place: Place) -> str:
    return linecache.getline(place.file, place.number).strip()


def places_of(
    lines: EarlierLines, module: nn.Module, optimizer: Any = None, loader: Any = None
) -> EarlierPlaces:
    names = ModuleNames()
    names.modules["model"] = module
    return lines.places(optimizer, loader, names)


def test_what_a_class_of_the_script_makes_was_made_where_the_class_was_called(
    lines: EarlierLines,
) -> None:
    model = nn.Linear(1, 1)
    optimizer = OfAll(model)
    loader = Shuffled(3)
    found = places_of(lines, model, optimizer, loader)
    assert source(found.optimizer) == "optimizer = OfAll(model)"
    assert source(found.loader) == "loader = Shuffled(3)"


def test_what_was_made_inside_another_object_was_made_there(lines: EarlierLines) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.loader = Shuffled(3)

    found = places_of(lines, nn.Linear(1, 1), loader=Trainer().loader)
    assert source(found.loader) == "self.loader = Shuffled(3)"


@pytest.mark.parametrize("loads", ["the model", "a wrapper", "a part"])
def test_weights_are_loaded_into_a_model_a_wrapper_or_a_part(
    loads: str, lines: EarlierLines
) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    into = {"the model": model, "a wrapper": Wrapper(model), "a part": model[0]}[loads]
    into.load_state_dict(into.state_dict())
    found = places_of(lines, model)
    assert source(found.loaded["model"]) == "into.load_state_dict(into.state_dict())"


def test_a_model_into_which_nothing_is_loaded_has_no_such_line(lines: EarlierLines) -> None:
    other = nn.Linear(1, 1)
    other.load_state_dict(other.state_dict())
    assert places_of(lines, nn.Linear(1, 1)).loaded == {}


def test_what_was_cleared_before_a_step_belongs_to_it(lines: EarlierLines) -> None:
    critic, painter = nn.Linear(1, 1), nn.Linear(1, 1)
    of_critic, of_painter = OfAll(critic), OfAll(painter)
    of_critic.zero_grad()
    lines.step_ends()
    painter.zero_grad()
    assert source(places_of(lines, critic, of_critic).cleared) == "of_critic.zero_grad()"
    lines.step_ends()
    assert source(places_of(lines, painter, of_painter).cleared) == "painter.zero_grad()"
    lines.step_ends()
    assert not places_of(lines, painter, of_painter).cleared.file  # nobody cleared anything


def test_the_lines_that_step_a_schedule_and_load_the_state_of_an_optimizer_are_known(
    lines: EarlierLines,
) -> None:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.5)
    schedule = lr_scheduler.StepLR(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    schedule.step()
    found = places_of(lines, model, optimizer)
    assert source(found.scheduled) == "schedule.step()"
    assert source(found.state_loaded) == "optimizer.load_state_dict(optimizer.state_dict())"
    assert found.steps_with["lr of group 0"] == "0.05"
