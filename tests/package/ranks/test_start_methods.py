"""Ranks are forked from a server that has imported torch once, or spawned if that cannot work."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
from torch import nn

from ddp_equivalence import BadCase, Rank, RankFailed, check
from ddp_equivalence.case.layouts import parse
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.rank_set import RankSet
from ddp_equivalence.ranks.server import PRELOAD, START_METHOD_VARIABLE
from ddp_equivalence.ranks.warm_ranks import WarmRanks
from tests.package.own_cases import own_case, right_step


def prints_its_parent(model: nn.Module, shard: Any, rank: Rank) -> None:
    print(os.getppid())
    right_step(model, shard, rank)


def test_ranks_can_be_spawned_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_METHOD_VARIABLE, "spawn")
    verdict = check(own_case(), prints_its_parent)
    assert verdict.outcome == "same", str(verdict)
    assert [int(text) for text in verdict.output.values()] == [os.getpid()] * 2
    monkeypatch.delenv(START_METHOD_VARIABLE)
    verdict = check(own_case(), prints_its_parent)
    assert os.getpid() not in [int(text) for text in verdict.output.values()]


def test_an_unknown_start_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_METHOD_VARIABLE, "fork")
    message = f"{START_METHOD_VARIABLE} is 'fork'; it should be forkserver .* or spawn"
    with pytest.raises(BadCase, match=message):
        check(own_case(), right_step)


def test_ranks_are_spawned_where_cuda_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in fails as ranks on a GPU do if the server has used CUDA, with torch's message."""
    methods: list[str] = []

    class OnCuda(RankSet):
        def start(self) -> None:
            methods.append(self._method)
            if self._method != "spawn":
                raise RankFailed("RuntimeError: Cannot re-initialize CUDA in forked subprocess. To")

    monkeypatch.setattr("ddp_equivalence.ranks.warm_ranks.RankSet", OnCuda)
    monkeypatch.setattr("ddp_equivalence.ranks.warm_ranks.cuda_devices", lambda: ("0", "1"))
    monkeypatch.setattr("ddp_equivalence.ranks.warm_ranks.xdist_locks", lambda: None)
    ranks, layout = WarmRanks(), parse("1x2")
    for _ in range(2):
        with ranks.acquire(layout, Lane("nccl", "nccl", "cuda"), 30.0, fresh=True):
            pass
    assert methods == ["forkserver", "spawn", "spawn"]


@pytest.mark.parametrize("name", PRELOAD)
def test_every_module_that_the_server_preloads_exists(name: str) -> None:
    """If a name is wrong, multiprocessing ignores it, and every rank imports the module itself."""
    assert find_spec(name) is not None
