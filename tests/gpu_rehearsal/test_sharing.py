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

@pytest.mark.parametrize("backend", ["nccl", "gloo_cuda"])
@pytest.mark.parametrize("layout", ["1x1", "1x2", "1x1"])
def test_right(layout, backend):
    verdict = check(own_case(layout=layout), right_step, backend=backend)
    assert verdict.outcome == "same", str(verdict)
"""

NEEDS_MEMORY = """
def needs_memory(model, shard, rank):
    free, total = torch.cuda.mem_get_info()
    if total - free > 700 * 2**20:  # more than the context of one process
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB")
    right_step(model, shard, rank)

def needs_more_than_there_is(model, shard, rank):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 400 GiB")

def test_memory_that_idle_ranks_hold_is_there_for_a_step():
    assert check(own_case(layout="1x1"), right_step, backend="gloo_cuda").outcome == "same"
    assert check(own_case(layout="1x1"), right_step, backend="nccl").outcome == "same"
    verdict = check(own_case(layout="1x2"), needs_memory, backend="nccl")
    assert verdict.outcome == "same", str(verdict)

def test_memory_that_nobody_has_is_missing():
    assert check(own_case(layout="1x1"), right_step, backend="nccl").outcome == "same"
    verdict = check(own_case(layout="1x2"), needs_more_than_there_is, backend="nccl")
    assert verdict.outcome == "unknown"
    assert "Tried to allocate 400 GiB" in " ".join(str(verdict).split())
"""


def many_sets(
    folder: Path, tests: str, *options: str, exclusive: bool = False, contexts: int = 0
) -> Rehearsed:
    (folder / "test_many_sets.py").write_text(tests)
    arguments = ("pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *options)
    return rehearse(*arguments, gpus=2, exclusive=exclusive, contexts=contexts, folder=folder)


def test_idle_ranks_leave_gpus_that_have_no_memory_for_more(tmp_path: Path) -> None:
    rehearsed = many_sets(tmp_path, MANY_SETS + NEEDS_MEMORY, contexts=2)
    assert "8 passed" in rehearsed.output, rehearsed.output
    assert rehearsed.most_contexts() == {0: 2, 1: 2}
    assert any(" no_memory " in line for line in rehearsed.log), "nothing had to leave"


@pytest.mark.thorough
def test_idle_ranks_leave_gpus_that_only_one_process_may_use(tmp_path: Path) -> None:
    rehearsed = many_sets(tmp_path, MANY_SETS, "-n", "2", exclusive=True)
    assert "6 passed" in rehearsed.output, rehearsed.output
    assert rehearsed.most_contexts() == {0: 1, 1: 1}
