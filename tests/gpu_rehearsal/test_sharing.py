"""Ranks that stay idle leave room on the GPUs for those that are needed next."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_rehearsal.rehearsal import Rehearsed, rehearse

MANY_SETS = """
import pytest
import torch
from ddp_equivalence import check
from tests.package.own_cases import own_case, right_step

SETS = (("1x1", "nccl"), ("1x2", "nccl"), ("2x1", "nccl"), ("1x2", "gloo_cuda"))

@pytest.mark.parametrize(("layout", "backend"), SETS * 2)
def test_right(layout, backend):
    verdict = check(own_case(layout=layout), right_step, backend=backend)
    assert verdict.outcome == "same", str(verdict)
"""


def many_sets(folder: Path, *options: str, exclusive: bool = False, contexts: int = 0) -> Rehearsed:
    (folder / "test_many_sets.py").write_text(MANY_SETS)
    arguments = ("pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *options)
    return rehearse(*arguments, gpus=2, exclusive=exclusive, contexts=contexts, folder=folder)


def test_idle_ranks_stay_where_there_is_room(tmp_path: Path) -> None:
    rehearsed = many_sets(tmp_path)
    assert "8 passed" in rehearsed.output, rehearsed.output
    assert rehearsed.most_contexts() == {0: 4, 1: 3}
    assert len(rehearsed.contexts) == 7


def test_idle_ranks_leave_gpus_that_have_no_memory_for_more(tmp_path: Path) -> None:
    rehearsed = many_sets(tmp_path, contexts=2)
    assert "8 passed" in rehearsed.output, rehearsed.output
    assert rehearsed.most_contexts() == {0: 2, 1: 2}


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one worker", "two workers"])
def test_idle_ranks_leave_gpus_that_only_one_process_may_use(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    rehearsed = many_sets(tmp_path, *options, exclusive=True)
    assert "8 passed" in rehearsed.output, rehearsed.output
    assert rehearsed.most_contexts() == {0: 1, 1: 1}
