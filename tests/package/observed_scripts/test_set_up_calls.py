"""What is recorded of a script before its model is called does not disturb the script."""

from __future__ import annotations

import cProfile
import gc
import runpy
import sys
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.lines import code_of
from ddp_equivalence.observed_scripts.in_script.watch import SetUpCalls
from ddp_equivalence.observed_scripts.launch import STARTUP


def test_what_cannot_be_recorded_does_not_fail_in_the_script() -> None:
    def fail(frame: FrameType) -> None:
        raise ValueError("cannot be recorded")

    calls = SetUpCalls()
    calls._handlers[code_of(DataLoader.__init__)] = fail
    calls.begin()
    try:
        loader: DataLoader[bool] = DataLoader(Profiled())
        torch.manual_seed(7)
    finally:
        found = calls.end({})
    assert len(loader) == 1
    assert [call.kind for call in found] == [Kind.SEED]
    assert sys.getprofile() is None


def test_the_ranks_of_a_group_may_be_an_array() -> None:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    calls = SetUpCalls()
    calls.begin()
    try:
        dist.new_group(np.arange(1))
    finally:
        found = calls.end({})
        dist.destroy_process_group()
    assert [(call.kind, call.ranks) for call in found] == [(Kind.NEW_GROUP, (0,))]


def test_nothing_is_recorded_in_a_worker_of_a_loader() -> None:
    calls = SetUpCalls()
    calls.begin()
    try:
        loader = DataLoader(Profiled(), num_workers=1, multiprocessing_context="fork")
        (is_profiled,) = loader
    finally:
        calls.stop()
    assert not is_profiled


def test_the_profiler_of_a_user_stays() -> None:
    def profile(*event: object) -> None:
        """Somebody else's."""

    sys.setprofile(profile)
    calls = SetUpCalls()
    try:
        calls.begin()
        assert sys.getprofile() is profile
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
