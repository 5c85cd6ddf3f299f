"""Everything that a rank prints is with its test, whatever pytest captures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ddp_equivalence import Rank, check
from tests.package.own_cases import own_case, right_step
from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run


def test_the_output_of_every_rank_comes_with_the_verdict() -> None:
    def prints(model: nn.Module, shard: Any, rank: Rank) -> None:
        print("hello from", rank.rank)
        os.write(2, b"and from below python\n")
        right_step(model, shard, rank)

    verdict = check(own_case(), prints)
    assert "hello from 1" in verdict.output[1]
    assert "and from below python" in verdict.output[1]
    assert "hello" not in str(check(own_case(), right_step).output)


@pytest.mark.parametrize("fails", [False, True])
def test_a_last_line_without_a_newline_is_in_the_output(fails: bool) -> None:
    def prints(model: nn.Module, shard: Any, rank: Rank) -> None:
        print("rank", rank.rank, "was here", end="")
        right_step(model, shard, rank)
        if fails:
            raise ValueError("no such thing")

    assert check(own_case(), right_step).output == {0: "", 1: ""}
    verdict = check(own_case(), prints)
    assert verdict.output == {0: "rank 0 was here", 1: "rank 1 was here"}
    assert check(own_case(), right_step).output == {0: "", 1: ""}


PRINTS = """
def prints(model, rows, rank):
    import os
    print("rank", rank.rank, "prints")
    os.write(2, f"rank {rank.rank} writes\\n".encode())
    if rank.rank == 1:
        raise ValueError("no such thing")
    step(model, rows, rank)

def test_prints(equivalence):
    equivalence.assert_equivalent(CASE, prints)
"""


def test_the_output_of_each_rank_is_with_its_test_in_a_worker_of_xdist_too(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIR_TEST + PRINTS)
    code, text = run(tmp_path, "-n", "1", "-k", "test_prints")
    assert code == 1, text
    for rank in (0, 1):
        section = text.partition(f"output of rank {rank} (node 0)")[2]
        assert f"rank {rank} prints" in section
        assert f"rank {rank} writes" in section
