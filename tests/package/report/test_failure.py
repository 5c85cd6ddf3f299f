"""The report of ranks that failed: what several ranks share is printed once, and a failure that a
step for a training script often meets says what to do about it.
"""

from __future__ import annotations

import pdb
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddp_equivalence import BadCase, Rank, check
from ddp_equivalence.ranks.failure import RankEnd, RankFailed
from ddp_equivalence.ranks.lanes import Lane
from ddp_equivalence.report.failure import failure_blocks, hint_lines
from tests.package.own_cases import build_model, make_batch, own_case, right_step


def text_of(*ends: RankEnd) -> str:
    blocks = failure_blocks(RankFailed("a rank failed", ends), "a rank failed", None)
    return "\n".join(line.text for block in blocks for line in block)


def raised(rank: int, what: str = "ValueError: oh", line: str = "mine.py:3: raise") -> RankEnd:
    detail = f"Traceback (most recent call last):\n{what}"
    return RankEnd(rank, rank // 2, rank % 2, "exception", what, detail, line)


def killed(rank: int) -> RankEnd:
    return RankEnd(rank, 0, rank, "signal", "killed by SIGKILL", signal_number=9)


LOST = "RuntimeError: Connection closed by peer"
CAUSE = "Root cause: rank {} (node 0, local rank {}) {}"


@pytest.mark.parametrize(
    ("ends", "begins", "says", "consequences"),
    [
        (
            [raised(rank) for rank in (2, 0, 3, 1)],
            CAUSE.format(0, 0, "ValueError: oh"),
            ["  Ranks 1, 2, 3 raised the same."],
            0,
        ),
        (
            [raised(0), raised(1)],
            CAUSE.format(0, 0, "ValueError: oh"),
            ["  Rank 1 raised the same."],
            0,
        ),
        (
            [raised(rank, f"ValueError: rank {rank}: oh -1.5e-{rank}") for rank in (1, 0)],
            CAUSE.format(0, 0, "ValueError: rank 0: oh -1.5e-0"),
            ["  Rank 1 raised the same, with other numbers."],
            0,
        ),
        (
            [
                *(raised(1), raised(3, LOST, "b.py:1: x")),
                *(raised(0, "KeyError: 'a'"), raised(2, LOST, "b.py:1: x")),
            ],
            CAUSE.format(1, 1, "ValueError: oh"),
            [
                f"Then: rank 2 (node 1, local rank 0) {LOST}",
                "  Rank 3 raised the same.",
                "Then: rank 0 (node 0, local rank 0) KeyError: 'a'",
            ],
            2,
        ),
        (
            [raised(0), raised(1, line="mine.py:9: raise")],
            CAUSE.format(0, 0, "ValueError: oh"),
            ["Then: rank 1 (node 0, local rank 1) ValueError: oh"],
            1,
        ),
        (
            [killed(rank) for rank in range(3)],
            CAUSE.format(0, 0, "killed by SIGKILL"),
            ["  The same is true of ranks 1, 2."],
            0,
        ),
        (
            [raised(rank, f"ValueError: {chr(65 + rank // 2)}") for rank in range(20)],
            CAUSE.format(0, 0, "ValueError: A"),
            ["Then: rank", "  Then: 4 more ranks"],
            8,
        ),
    ],
    ids=[
        *("all alike", "one other", "other numbers", "two consequences", "another line"),
        *("without an error", "more than are shown"),
    ],
)
def test_ranks_that_ended_alike_share_an_entry(
    ends: list[RankEnd], begins: str, says: list[str], consequences: int
) -> None:
    text = text_of(*ends)
    assert begins in text
    assert [one for one in says if one not in text] == []
    assert text.count("Then: ") == consequences


def every_rank_fails(model: nn.Module, shard: Any, rank: Rank) -> None:
    print("about to fail")
    raise ValueError("no such column: age")


def test_a_step_that_fails_on_every_rank_has_one_error_and_one_output() -> None:
    text = check(own_case(layout="2x2"), every_rank_fails).full_report()
    assert "Root cause: rank 0 (node 0, local rank 0) ValueError: no such column: age" in text
    assert "  Ranks 1, 2, 3 raised the same." in text
    assert text.count("about to fail") == 1
    assert "  Output of ranks 0, 1, 2, 3" in text


def test_a_traceback_begins_at_the_users_code() -> None:
    def fails(model: nn.Module, shard: Any, rank: Rank) -> None:
        raise LookupError("no such column")

    text = check(own_case(), fails).full_report()
    traceback = text[text.index("Traceback") : text.index("Evidence:")]
    assert traceback.count("  File ") == 1
    assert "in fails" in traceback


# What to do about it.


def makes_two_groups(model: nn.Module, shard: Any, rank: Rank) -> None:
    dist.init_process_group("gloo")
    dist.init_process_group("gloo")


def destroys_the_group(model: nn.Module, shard: Any, rank: Rank) -> None:
    dist.destroy_process_group()
    right_step(model, shard, rank)


def stops(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank == 1:
        pdb.set_trace()
    right_step(model, shard, rank)


def asks(model: nn.Module, shard: Any, rank: Rank) -> None:
    input("Go on?")


def sends_a_local_class(model: nn.Module, shard: Any, rank: Rank) -> None:
    class Numbers(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 2

    list(DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))


@pytest.mark.parametrize(
    ("step", "advice"),
    [
        (makes_two_groups, "the step has called init_process_group twice"),
        (destroys_the_group, "Move that call to the end, or leave it out"),
        (stops, "With --in-process, or check(..., in_process=True), rank 0 is the process"),
        (asks, "With --in-process, or check(..., in_process=True), rank 0 is the process"),
        (sends_a_local_class, "Define it at the top of its file, or start the workers with fork"),
    ],
    ids=["makes two groups", "destroys the group", "a debugger", "input", "a local class"],
)
def test_the_report_says_what_to_do_about(step: Callable[..., None], advice: str) -> None:
    verdict = check(own_case(), step)
    assert verdict.outcome == "unknown"
    assert " ".join(str(verdict).split()).count(advice) == 1


def test_an_exception_of_the_users_own_code_gets_no_advice() -> None:
    assert hint_lines("ValueError: no such column") == []


def builds_ddp() -> nn.Module:
    return DistributedDataParallel(build_model())


def waits_for_all(generator: torch.Generator) -> Any:
    dist.barrier()
    return make_batch(generator)


@pytest.mark.parametrize(("field", "function"), [("model", builds_ddp), ("batch", waits_for_all)])
def test_a_collective_outside_the_step_is_a_bad_case_that_says_so(
    field: str, function: Callable[..., Any]
) -> None:
    with pytest.raises(BadCase, match="collectives belong in the step") as caught:
        check(own_case(**{field: function}), right_step)
    assert caught.value.field == field


NO_GPU = "RuntimeError: No CUDA GPUs are available"
NO_SUCH_GPU = "torch.AcceleratorError: CUDA error: invalid device ordinal"


@pytest.mark.parametrize(
    ("what", "lane", "gpus", "advice"),
    [
        (
            NO_GPU,
            Lane("gloo_fallback", "gloo", "cpu", "needs 4 CUDA devices, found 2"),
            2,
            "NCCL needs 4 CUDA devices, found 2, so the ranks ran on the CPU, with the GPUs hidden",
        ),
        (
            NO_GPU,
            Lane("gloo", "gloo", "cpu"),
            2,
            "the backend is gloo, so the ranks ran on the CPU",
        ),
        (NO_GPU, Lane("gloo", "gloo", "cpu"), 2, "with --backend gloo_cuda"),
        (
            "AssertionError: Torch not compiled with CUDA enabled",
            Lane("gloo_fallback", "gloo", "cpu", "needs 2 CUDA devices, found 0"),
            0,
            "torch can use no CUDA device of this machine",
        ),
        (
            NO_SUCH_GPU,
            Lane("gloo_cuda", "gloo", "cuda", "ranks share GPUs", ranks_share_gpus=True),
            2,
            "each rank sees a single GPU, which is its cuda:0",
        ),
        (NO_SUCH_GPU, Lane("nccl", "nccl", "cuda"), 4, "by LOCAL_RANK and not by RANK"),
    ],
)
def test_a_device_that_a_rank_does_not_have_is_explained(
    what: str, lane: Lane, gpus: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tuple(map(str, range(gpus)))
    monkeypatch.setattr("ddp_equivalence.ranks.lanes.cuda_devices", lambda: names)
    text = " ".join(line.text.strip() for line in hint_lines(what, lane))
    assert advice in text


def test_an_error_of_cuda_on_a_rank_that_has_gpus_gets_no_hint_about_the_cpu() -> None:
    assert hint_lines(NO_GPU, Lane("nccl", "nccl", "cuda")) == []
