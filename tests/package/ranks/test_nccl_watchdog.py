"""NCCL's watchdog writes no file and ends a rank soon, unless the user's environment says else."""

from __future__ import annotations

import os

import pytest

from ddp_equivalence import Rank
from ddp_equivalence.ranks.warm_ranks import on_ranks

DUMP, WAIT = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


def settings(rank: Rank) -> tuple[str, str]:
    return os.environ[DUMP], os.environ[WAIT]


def test_a_rank_ends_long_before_the_deadline_of_its_case() -> None:
    assert on_ranks("1x2", settings) == (("0", "250"),) * 2


def test_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DUMP, "1")
    monkeypatch.setenv(WAIT, "15000")
    assert on_ranks("1x2", settings) == (("1", "15000"),) * 2
