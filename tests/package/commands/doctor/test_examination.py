"""The doctor: what it says of the answers of GPUs, pairs and lanes, and its exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_equivalence.commands.doctor import examination
from ddp_equivalence.commands.doctor.command import result
from ddp_equivalence.commands.doctor.examination import (
    AllReduceAnswer,
    Answers,
    GpuAnswer,
    Machine,
    Outcome,
    State,
    ask_ranks,
    examine,
)
from ddp_equivalence.ranks import Rank
from ddp_equivalence.ranks.failure import RankFailed
from ddp_equivalence.ranks.gpus import Gpus, Link, NvmlState
from ddp_equivalence.ranks.lanes import Lane
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
        monkeypatch.setattr(
            examination, "sum_over", lambda name, *_: State(name, Outcome.WORKS, "right")
        )
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
    broken = found(1, Outcome.FAILED)
    of_four = lines_of(box(*map(gpu, range(4))), found(0), broken, found(2), found(3))
    assert "all 3" in parts(of_four)


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


HANGS = Answers(error="ranks 0 and 1 did not come back\nNCCL INFO ...")

Play = Callable[[tuple[str, ...], bool], Answers]


def sums(*wrong: str) -> Answers:
    return Answers(tuple(AllReduceAnswer(0.5, text) for text in wrong or ("", "")))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], list[tuple[tuple[str, ...], bool]]]:
    """Let a function answer for ranks; it is given the GPUs, and whether P2P was switched off.

    Returns the list of the questions.
    """

    def install(play: Play) -> list[tuple[tuple[str, ...], bool]]:
        asked: list[tuple[tuple[str, ...], bool]] = []

        def answer(lane: Lane, devices: list[str], *_: Any, **options: Any) -> Answers:
            without_p2p = bool(options.get("extra_environment"))
            asked.append((tuple(devices), without_p2p))
            return play(tuple(devices), without_p2p)

        monkeypatch.setattr(examination, "ask_ranks", answer)
        monkeypatch.setattr(examination, "SIZE", 10**9)
        return asked

    return install


def test_every_gpu_is_asked_and_says_what_was_wrong(played: Any) -> None:
    answers = {
        "0": Answers((GpuAnswer("H100", "0abc", ""),)),
        "GPU-7": Answers((GpuAnswer("H100", "7abc", "no kernel\nmore"),)),
        "2": Answers(error="rank 0: CUDA error: busy\nmore"),
    }
    asked = played(lambda devices, _: answers[devices[0]])
    states = list(examination.gpu_states(tuple(answers)))
    assert asked == [(("0",), False), (("GPU-7",), False), (("2",), False)]
    outcomes = [one.outcome for one in states]
    assert outcomes == [Outcome.WORKS, Outcome.WRONG, Outcome.FAILED]
    assert "H100: a product is right" in states[0].text
    assert (states[1].text, states[1].error) == ("no kernel", "no kernel\nmore")
    assert states[2].text == "rank 0: CUDA error: busy"
    assert [one.answer is None for one in states] == [False, False, True]


def test_every_pair_of_working_gpus_is_tried_and_all_together(played: Any) -> None:
    asked, gpus = played(lambda *_: sums()), [found(0), found(2), found(3)]
    states = list(examination.pair_states(gpus, Gpus()))
    together = examination.sum_over("all 3", gpus, 60.0)
    devices = [devices for devices, _ in asked]
    assert devices == [("0", "2"), ("0", "3"), ("2", "3"), ("0", "2", "3")]
    assert [state.name for state in states] == ["0-2", "0-3", "2-3"]
    # Of two ranks each sends the tensor once: 1 GB in 0.5 s; of three each sends 4/3 of it.
    assert states[0].text == "the sum is right, 2.00 GB/s"
    assert together.text == "the sum is right, 2.67 GB/s"


def test_a_pair_says_what_nvml_knows_of_its_link(played: Any) -> None:
    """CUDA counts the GPUs in another order than NVML here: the UUIDs tell them apart."""
    played(lambda *_: sums())
    gpus = Gpus(
        (gpu(0, uuid="GPU-1abc"), gpu(1, uuid="GPU-0abc"), gpu(2, uuid="GPU-2abc")),
        links=(
            Link(0, 1, p2p="ok", nvlink=True, path="SYS"),
            Link(0, 2, p2p="ok", nvlink=False, path="PHB"),
            Link(1, 2, p2p="the chipset does not support it", nvlink=False, path="SYS"),
        ),
    )
    states = examination.pair_states([found(0), found(1), found(2)], gpus)
    texts = {pair.name: pair.text.partition("; ")[2] for pair in states}
    assert texts == {
        "0-1": "P2P over NVLink",
        "0-2": "PCI Express (SYS), no P2P: the chipset does not support it",
        "1-2": "P2P over PCI Express (PHB)",
    }


def test_a_pair_that_hangs_is_tried_without_p2p(played: Any) -> None:
    asked = played(lambda _, without_p2p: sums() if without_p2p else HANGS)
    (pair,) = examination.pair_states([found(0), found(1)], Gpus())
    assert asked == [(("0", "1"), False), (("0", "1"), True)]
    assert pair.outcome is Outcome.FAILED
    assert pair.without_p2p is Outcome.WORKS
    assert pair.text == (
        "ranks 0 and 1 did not come back; with NCCL_P2P_DISABLE=1: the sum is right, 2.00 GB/s"
    )


def test_a_wrong_sum_on_one_rank_is_wrong(played: Any) -> None:
    played(lambda *_: sums("", "3 elements are wrong on rank 1"))
    (pair,) = examination.pair_states([found(0), found(1)], Gpus())
    assert (pair.outcome, pair.without_p2p) == (Outcome.WRONG, Outcome.WRONG)
    assert pair.text.startswith("3 elements are wrong on rank 1; with")


def test_pairs_end_at_the_time_limit_and_the_rest_is_named(played: Any) -> None:
    played(lambda *_: sums())
    times: Iterator[float] = iter([0.0, 0.0, 299.0, 300.0])
    gpus = [found(number) for number in range(4)]
    pairs = list(examination.pair_states(gpus, Gpus(), clock=lambda: next(times)))
    assert [pair.name for pair in pairs] == ["0-1", "0-2", "others"]
    assert pairs[-1].outcome is Outcome.NOT_RUN
    assert pairs[-1].text == ("0-3, 1-2, 1-3, 2-3: the time limit of 300 s for all pairs was over")


def test_a_product_is_right_or_says_how_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    right = torch.Tensor.__matmul__
    assert examination.error_of_product(cpu) == ""
    calls: list[bool] = []

    def wrong_once(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        calls.append(True)
        product = right(left, other)
        return product + torch.eye(len(product)) if len(calls) == 1 else product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong_once)
    assert examination.error_of_product(cpu) == "256 of 65536 elements of a product are wrong"

    def raises_kernel(left: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(torch.Tensor, "__matmul__", raises_kernel)
    assert examination.error_of_product(cpu) == "no kernel image"


CPU = Lane("gloo", "gloo", "cpu")


def two_answers(rank: Rank, argument: object) -> Iterator[object]:
    yield rank.rank, argument


def raises(rank: Rank, argument: object) -> Iterator[object]:
    if rank == 1:
        print("NCCL WARN failed to extend /dev/shm")
        raise RuntimeError("oh")
    yield None


def hangs(rank: Rank, argument: object) -> Iterator[object]:
    import time

    time.sleep(600)
    yield None


def test_ranks_of_the_doctor_answer_in_order() -> None:
    answers = ask_ranks(CPU, ["a", "b"], two_answers, 7, seconds=60)
    assert answers == Answers(((0, 7), (1, 7)))


def debug_level(rank: Rank, argument: object) -> Iterator[str]:
    yield str(dist.get_debug_level())  # type: ignore[attr-defined]  # no stubs


def test_ranks_of_the_doctor_start_under_the_extra_variables() -> None:
    """NCCL_P2P_DISABLE is read when ranks join their group, as this variable is."""
    detail = (("TORCH_DISTRIBUTED_DEBUG", "INFO"),)
    without = ask_ranks(CPU, ["a"], debug_level, seconds=60)
    with_variable = ask_ranks(CPU, ["a"], debug_level, seconds=60, extra_environment=detail)
    assert without.by_rank == ("DebugLevel.OFF",)
    assert with_variable.by_rank == ("DebugLevel.INFO",)


def test_an_error_of_a_rank_comes_with_what_it_printed() -> None:
    answers = ask_ranks(CPU, ["a", "b"], raises, seconds=60)
    assert not answers.by_rank
    assert "rank 1 (node 0, local rank 1): RuntimeError: oh" in answers.error
    assert "/dev/shm" in answers.error


def test_ranks_that_hang_end_at_the_time_limit() -> None:
    examination.ask_ranks(CPU, ["a"], two_answers, seconds=60)  # the server has started
    answers = ask_ranks(CPU, ["a"], hangs, seconds=3)
    assert "did not come back" in answers.error
