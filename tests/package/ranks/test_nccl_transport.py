"""What NCCL's log says of the way that data takes between GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_equivalence.case.layouts import Layout
from ddp_equivalence.ranks import lanes, nccl, warm_ranks
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.ranks.nccl import Transport, read

LOG = """\
box:12:34 [0] NCCL INFO NCCL version 2.29.7+cuda13.0
box:12:34 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
box:12:34 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
box:12:35 [1] NCCL INFO Channel 00 : 1[1] -> 2[2] via SHM/direct/direct
box:12:36 [2] NCCL INFO Channel 00/0 : 2[2] -> 3[3] via P2P/direct pointer/read
box:12:36 [3] NCCL INFO Channel 00/0 : 3[3] -> 0[0] [send] via NET/Socket/0
box:12:36 [0] NCCL INFO Channel 00/0 : 3[3] -> 0[0] [receive] via NET/Socket/0
box:12:36 [0] NCCL INFO Channel 03/1 : 0[1a000] -> 1[1b000] via P2P/IPC
box:12:36 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0
"""


def test_every_pair_of_ranks_has_the_transports_of_its_channels() -> None:
    transport = read(LOG.splitlines())
    assert transport.pairs == {
        (0, 1): ("P2P/CUMEM", "P2P/IPC"),
        (1, 2): ("SHM/direct/direct",),
        (2, 3): ("P2P/direct",),
        (3, 0): ("NET/Socket/0",),
    }
    assert transport.problem == ""
    assert sum(transport.counts.values()) == 5


def test_a_log_without_such_lines_is_no_transport() -> None:
    transport = read(["box:12:34 [0] NCCL INFO NCCL version 2.29.7+cuda13.0"])
    assert (transport.pairs, transport.problem) == ({}, "NCCL's log names no transport")


def test_a_single_rank_needs_no_probe() -> None:
    assert nccl.transport(1).problem == "a single rank sends nothing"


class LoggingRanks:
    """Stands for ranks on NCCL: each writes its part of the log to a file of its own."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    @contextmanager
    def acquire(self, layout: Layout, lane: Lane, timeout: float, **how: Any) -> Iterator[Any]:
        self.asked = {"layout": str(layout), "lane": lane.name, **how}
        variables = dict(how["extra_environment"])
        assert variables["NCCL_DEBUG"] == "INFO"
        lines = LOG.splitlines(keepends=True)
        for process, part in ((12, lines[:3]), (13, lines[3:])):
            name = variables["NCCL_DEBUG_FILE"].replace("%p", str(process))
            Path(name).write_text("".join(part))
        yield SimpleNamespace(submit=lambda work: None, collect=lambda deadline: iter([(0, None)]))


def test_the_log_is_that_of_fresh_ranks_with_an_environment_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = LoggingRanks()
    monkeypatch.setattr(nccl, "missing", lambda lane, ranks: None)
    monkeypatch.setattr(nccl, "warm_ranks", lambda: ranks)
    before = dict(os.environ)
    assert nccl.transport(4) == read(LOG.splitlines())
    asked = [ranks.asked[name] for name in ("layout", "lane", "fresh")]
    assert asked == ["1x4", "nccl", True]
    assert dict(os.environ) == before


def test_too_few_gpus_are_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "cuda_devices", lambda: ("0",))
    assert nccl.transport(2) == Transport({}, "needs 2 CUDA devices (one rank each), found 1")


def test_ranks_that_do_not_start_are_a_reason_and_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks have no backend of this name."""
    monkeypatch.setattr(nccl, "missing", lambda lane, ranks: None)
    monkeypatch.setattr(warm_ranks, "cuda_devices", lambda: ("0", "1"))
    monkeypatch.setattr(warm_ranks, "xdist_locks", lambda: None)
    transport = nccl.transport(2, "no_such_backend")
    assert not transport.pairs
    assert transport.problem.startswith("the ranks of the probe failed: ")
