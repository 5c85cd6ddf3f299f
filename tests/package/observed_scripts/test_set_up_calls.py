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
from ddp_equivalence.observed_scripts.in_script.closer_look import SetUpCalls
from ddp_equivalence.observed_scripts.launch import STARTUP


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
