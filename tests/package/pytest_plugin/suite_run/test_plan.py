"""The plan of a run, from the tests that pytest collected."""

from __future__ import annotations

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest, plan_in_short, plan_lines
from ddp_equivalence.ranks import lanes

TESTS = (
    PlannedTest("a", "ddp_mean", "1x2", "nccl"),
    PlannedTest("b", "ddp_mean", "2x2", "nccl"),
    PlannedTest("c", "ddp_mean", "2x4", "gloo_fallback"),
    PlannedTest("d", "data_parallel", "1x4", "data_parallel", "needs 4 CUDA devices, found 2"),
    PlannedTest("e", "data_parallel", "1x4", "data_parallel", "needs 4 CUDA devices, found 2"),
    PlannedTest("f"),
    PlannedTest("g", reason="the GPU is too old"),
)


@pytest.fixture(autouse=True)
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs that ranks of NCCL cannot share."""
    monkeypatch.setenv("NCCL_HOSTID", "one")
    monkeypatch.setattr(lanes, "cuda_devices", lambda: ("0", "1", "2", "3"))


def test_the_plan_counts_every_test_once_on_its_lane_or_with_its_reason() -> None:
    others = "right code that looks wrong, and planted faults; each chooses its lane when it runs"
    assert list(plan_lines(TESTS)) == [
        "Plan: 7 tests, of which 3 will not run",
        "  nccl           2 cases on 2 to 4 ranks",
        "  gloo_fallback  1 case on 8 ranks: needs 8 CUDA devices (NCCL_HOSTID is set, so NCCL "
        "takes all ranks for ranks of one host), found 4",
        f"  others         1 test: {others}",
        "  NOT RUN        2 cases on data_parallel: needs 4 CUDA devices, found 2",
        "  NOT RUN        1 test: the GPU is too old",
    ]


def test_the_short_plan_has_one_line() -> None:
    assert plan_in_short(TESTS) == (
        "Plan: 2 cases on nccl, 1 case on gloo_fallback, 1 other test, 3 that will not run "
        "(--plan says why)"
    )


def test_a_plan_without_tests_says_so() -> None:
    assert plan_in_short(()) == "Plan: nothing"
    assert list(plan_lines(())) == ["Plan: 0 tests"]
