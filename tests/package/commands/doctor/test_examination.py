"""What the doctor prints, and its exit code. The states of the machine's parts are given."""

from __future__ import annotations

from typing import Any

import pytest

from ddp_equivalence.commands.doctor import examination
from ddp_equivalence.commands.doctor.command import result
from ddp_equivalence.commands.doctor.examination import Machine, Outcome, State, examine
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import NvmlState
from tests.package.commands.doctor.boxes import box, found, gpu

ROCM: dict[str, Any] = {
    "nvml": NvmlState.ROCM,
    "problem": "NVML was not asked: this torch is built for ROCm",
    "torch_cuda": None,
    "torch_hip": "6.4",
}


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examine a machine whose GPUs have these states, where NCCL lacks nothing or ``nccl``."""

    def lines(machine: Machine, *gpus: State, nccl: str | None = None) -> list[str]:
        pair = State("0-1", Outcome.WORKS, "right")
        monkeypatch.setattr(examination, "gpu_states", lambda devices: gpus)
        monkeypatch.setattr(examination, "pair_states", lambda found, nvml: [pair])
        together = State(f"all {len(gpus)}", Outcome.WORKS, "right")
        monkeypatch.setattr(examination, "all_together", lambda found: together)
        nodes = State("nodes", Outcome.WORKS, "NCCL counts 2 of 2 simulated nodes")
        monkeypatch.setattr(examination, "node_state", lambda: nodes)
        lane = State("gloo_fallback", Outcome.WORKS, "right")
        monkeypatch.setattr(examination, "lane_states", lambda machine: [lane])
        monkeypatch.setattr(examination, "missing", lambda name, ranks: nccl)
        return list(map(str, examine(machine)))

    return lines


def parts(lines: list[str]) -> dict[str, str]:
    """Name -> outcome of every line of the table."""
    words = {line[2:24].rstrip(): line[24:33].rstrip() for line in lines if line.startswith("  ")}
    assert set(words.values()) <= set(Outcome)
    return words


def test_without_a_gpu_only_the_lanes_are_asked(lines_of: Any) -> None:
    assert parts(lines_of(box())) == {"gloo_fallback": "works"}


def test_one_gpu_has_no_pairs(lines_of: Any) -> None:
    lines = lines_of(box(gpu(0)), found(0))
    assert parts(lines) == {"cuda:0": "works", "gloo_fallback": "works"}


def test_two_gpus_are_asked_together_once_and_three_again(lines_of: Any) -> None:
    two = parts(lines_of(box(gpu(0), gpu(1)), found(0), found(1)))
    assert list(two) == ["cuda:0", "cuda:1", "0-1", "nodes", "gloo_fallback"]
    three = parts(lines_of(box(*map(gpu, range(3))), *map(found, range(3))))
    together = ["0-1", "all 3", "nodes"]
    assert list(three) == ["cuda:0", "cuda:1", "cuda:2", *together, "gloo_fallback"]


def test_pairs_that_cannot_run_are_named_with_the_reason(lines_of: Any) -> None:
    machine = box(gpu(0), gpu(1))
    lines = lines_of(machine, found(0), found(1, Outcome.FAILED))
    assert "  pairs                 NOT RUN  of 2 GPUs, 1 works alone" in lines
    lines = lines_of(machine, found(0), found(1), nccl="this torch has no backend nccl")
    assert "  pairs                 NOT RUN  this torch has no backend nccl" in lines


def test_what_nobody_could_say_of_the_gpus_is_not_run(lines_of: Any) -> None:
    lines = lines_of(box(devices=("0",), **ROCM), found(0))
    (line,) = [line for line in lines if line.startswith("  NVML")]
    assert "NOT RUN  driver, free memory, compute mode, MIG and P2P of the GPUs: NVML was" in line
    assert parts(lines)["cuda:0"] == "works"


@pytest.mark.parametrize(
    ("outcomes", "code", "says"),
    [
        ([], 0, "0 of 0 parts gave right answers"),
        ([Outcome.WORKS], 0, "1 of 1 part gave right answers"),
        ([Outcome.WORKS, Outcome.NOT_RUN], 0, "1 of 2 parts gave right answers; the others could"),
        ([Outcome.WORKS, Outcome.FAILED], 3, "1 of 2 parts gave no answer, though they should"),
        ([Outcome.FAILED, Outcome.WRONG], 1, "1 of 2 parts gave WRONG answers"),
    ],
)
def test_the_last_line_is_the_result_and_the_exit_code(
    outcomes: list[Outcome], code: int, says: str
) -> None:
    states = [State("part", outcome, "") for outcome in outcomes]
    found, line = result(states)
    assert found == code
    assert says in line
    assert f"(exit code {code})" in line


# The nodes that NCCL counts of two ranks on two simulated nodes. The count is given.


@pytest.mark.parametrize(
    ("counted", "outcome"),
    [
        *((2, Outcome.WORKS), (1, Outcome.WRONG), (None, Outcome.NOT_RUN)),
        (RankFailed("NCCL error\nmore"), Outcome.FAILED),
    ],
)
def test_two_nodes_must_be_counted(
    counted: int | RankFailed | None, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(layout: object) -> int | None:
        if isinstance(counted, RankFailed):
            raise counted
        return counted

    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(examination, "nodes_counted", count)
    state = examination.node_state()
    assert state.outcome is outcome
    assert state.text == "NCCL error" or outcome is not Outcome.FAILED
    monkeypatch.setenv("NCCL_HOSTID", "one")
    state = examination.node_state()
    assert state.outcome is Outcome.NOT_RUN
    assert "NCCL_HOSTID is set" in state.text
