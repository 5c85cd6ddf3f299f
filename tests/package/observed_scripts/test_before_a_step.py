"""What is recorded of a script before a step: it does not disturb the script."""

from __future__ import annotations

import cProfile
import gc
import linecache
import runpy
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, Dataset

from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.measurement.lines import code_of
from ddp_equivalence.observed_scripts.in_script.closer_look import SetUpCalls
from ddp_equivalence.observed_scripts.in_script.kept_tensors import ModuleNames
from ddp_equivalence.observed_scripts.in_script.recorder import CHANGING, LastLines
from ddp_equivalence.observed_scripts.launch import STARTUP
from ddp_equivalence.observed_scripts.record import LastLine, Step


def test_the_ranks_of_a_group_may_be_an_array_and_what_fails_is_left_out() -> None:
    def fail(frame: FrameType) -> None:
        raise ValueError("cannot be recorded")

    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    calls = SetUpCalls()
    calls._handlers[code_of(DataLoader.__init__)] = fail
    calls.begin()
    try:
        assert len(DataLoader(Profiled())) == 1
        torch.manual_seed(7)
        dist.new_group(np.arange(1))
    finally:
        found = calls.end({})
        dist.destroy_process_group()
    assert [(call.kind, call.ranks) for call in found] == [(Kind.SEED, ()), (Kind.NEW_GROUP, (0,))]


def test_nothing_is_recorded_in_a_worker_of_a_loader() -> None:
    calls = SetUpCalls()
    calls.begin()
    try:
        loader = DataLoader(Profiled(), num_workers=1, multiprocessing_context="fork")
        assert list(loader) == [False]
    finally:
        calls.stop()


def test_the_profiler_of_a_user_stays() -> None:
    def profile(*event: object) -> None:
        """Somebody else's."""

    sys.setprofile(profile)
    calls = SetUpCalls()
    try:
        calls.begin()
        assert calls.end({}) == []
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)


class Profiled(Dataset[bool]):
    """Its one row says whether a profiler is set where it is read."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return sys.getprofile() is not None


@pytest.fixture(autouse=True)
def _no_profiler() -> Iterator[None]:
    assert sys.getprofile() is None
    yield
    assert sys.getprofile() is None


def test_a_profiler_of_a_user_goes_on_while_torch_is_imported_and_the_watch_rests() -> None:
    quick = runpy.run_path(str(STARTUP / "sitecustomize.py"))["_quick"]
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        with quick():
            assert not gc.isenabled()
            sorted([1])
        assert gc.isenabled()
    finally:
        profiler.disable()
    assert [one for one in profiler.getstats() if "sorted" in str(one.code)]
    calls = SetUpCalls()
    calls.begin()
    watch = sys.getprofile()
    try:
        with quick():
            assert sys.getprofile() is None
        assert sys.getprofile() == watch is not None
    finally:
        calls.stop()


# --- which line last made or changed what a script trains with


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
