"""A run of the suite: the tests that it selects, its plan, the GPUs that it used, and its page."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

from ddp_equivalence.commands.suite_folder import TESTS
from ddp_equivalence.faults import FAULTS
from ddp_equivalence.pytest_plugin import suite_run
from ddp_equivalence.pytest_plugin.suite_run import (
    LONGEST_BLOCK,
    SAID_OF_ALL,
    PlannedTest,
    covering,
    gpu_lines,
    plan_lines,
    transport_line,
    without_private,
    write_page,
)
from ddp_equivalence.ranks import lanes
from ddp_equivalence.ranks.gpus import Gpu, Gpus
from ddp_equivalence.ranks.nccl import Transport
from ddp_equivalence.report.machine import Box
from ddp_equivalence.report.text import Style
from tests.package.commands.test_command_line import A_FEW, ROOT, run
from tests.package.pytest_plugin.test_table import record
from tests.package.someone_elses_run import run as run_pytest

# Few tests have every pair of values that the tests of a run have.

COUNTS = re.compile(r"selected ([\d,]+) of ([\d,]+) \(pairwise\); --all runs the rest")


@pytest.mark.parametrize("seed", range(30))
def test_every_pair_of_values_is_in_a_chosen_test(seed: int) -> None:
    draw = random.Random(seed)
    factors = {f"factor_{n}": draw.randrange(1, 5) for n in range(draw.randrange(2, 6))}
    every = [dict(zip(factors, one, strict=True)) for one in product(*map(range, factors.values()))]
    tests: list[dict[str, object]] = [dict(one) for one in draw.sample(every, len(every) // 2)]
    chosen = [tests[number] for number in covering(tests, [draw.random() for _ in tests])]
    for first, second in combinations(factors, 2):
        pairs = {(one[first], one[second]) for one in tests}
        assert {(one[first], one[second]) for one in chosen} == pairs


@pytest.mark.parametrize(
    ("tests", "costs", "chosen"),
    [
        ([(1, 2)] * 5, (), [0]),
        ([], (), []),
        ([(1, 2)] * 3, (2.0, 1.0, 3.0), [1]),  # of tests with the same pairs, the cheap one
        # The first adds two pairs at once; the others have all of them, and each is needed.
        ([(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0)], (2.0, 1.0, 1.0, 1.0), [1, 2, 3]),
    ],
)
def test_tests_that_add_no_pair_are_left_out(
    tests: list[tuple[int, ...]], costs: tuple[float, ...], chosen: list[int]
) -> None:
    assert covering([dict(zip("abc", one, strict=False)) for one in tests], costs) == chosen


@cache
def collected(
    *arguments: str, pairwise: bool = True, paths: str = TESTS
) -> tuple[frozenset[str], int]:
    """The tests that a run collects, and how many it leaves out. ``paths``: where it looks if it is
    not told.
    """
    words = ["--collect-only", "-q", "-o", f"testpaths={paths}", "-W", "default"]
    code, text = run_pytest(ROOT, *words, *["--ddp-pairwise"] * pairwise, *arguments)
    assert code == 0, text
    left_out = re.search(r"\((\d+) deselected\)", text)
    tests = frozenset(line for line in text.splitlines() if "::" in line)
    return tests, 0 if left_out is None else int(left_out[1])


@pytest.mark.usefixtures("no_cuda")
def test_the_selection_of_the_suite_has_all_values_and_every_fault_in_any_order() -> None:
    tests, left_out = collected("-p", "pytest_randomly")
    every, _ = collected(*TESTS.split())
    assert len(every) == len(tests) + left_out
    assert left_out > len(every) / 2
    assert tests < every
    assert collected()[0] == tests
    # What a value is, is written here once more: a part of the name of a test.
    parts = {part for test in tests for part in re.split(r"[\[\]-]", test)}
    assert not {part for test in every for part in re.split(r"[\[\]-]", test)} - parts
    found = (re.search(r"test_a_planted_fault_is_caught_and_named\[(\w+)-", one) for one in tests)
    assert {match[1] for match in found if match} == set(FAULTS)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    "arguments", [(A_FEW,), ("-k", "contrastive and 1x2"), ("-m", "gloo_fallback")]
)
def test_tests_that_the_user_names_all_run(arguments: tuple[str, ...]) -> None:
    found, of_all = (collected(*arguments, pairwise=one, paths=A_FEW) for one in (True, False))
    assert found == of_all


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    "words",
    [
        ("--plan",),
        pytest.param(("-n", "2", "--ddp-run-deadline", "0.001"), marks=pytest.mark.thorough),
    ],
)
def test_a_run_says_how_many_it_has_selected(words: tuple[str, ...]) -> None:
    """Without tests: with workers, time is over before the first. They select the same ones."""
    _, text, _ = run("run", *words, folder=ROOT)
    counts = COUNTS.search(text)
    assert counts, text[-3000:]
    selected, of = (int(count.replace(",", "")) for count in counts.groups())
    assert of - selected == collected()[1]


# The plan.


def test_the_plan_counts_every_test_once_on_its_lane_or_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "one")  # so that ranks of NCCL cannot share four GPUs
    monkeypatch.setattr(lanes, "cuda_devices", lambda: ("0", "1", "2", "3"))
    tests = (
        PlannedTest("1x2", "nccl"),
        PlannedTest("2x2", "nccl"),
        PlannedTest("2x4", "gloo_fallback"),
        PlannedTest("1x4", "data_parallel", "needs 4 CUDA devices, found 2"),
        PlannedTest("1x4", "data_parallel", "needs 4 CUDA devices, found 2"),
        PlannedTest(),
        PlannedTest(reason="the GPU is too old"),
    )
    others = "right code that looks wrong, and planted faults; each chooses its lane when it runs"
    assert list(plan_lines(tests)) == [
        "Plan: 7 tests, of which 3 will not run",
        "  nccl           2 cases on 2 to 4 ranks",
        "  gloo_fallback  1 case on 8 ranks: needs 8 CUDA devices (NCCL_HOSTID is set, so NCCL "
        "takes all ranks for ranks of one host), found 4",
        f"  others         1 test: {others}",
        "  NOT RUN        2 cases on data_parallel: needs 4 CUDA devices, found 2",
        "  NOT RUN        1 test: the GPU is too old",
    ]
    assert list(plan_lines(())) == ["Plan: 0 tests"]


# The GPUs that were used.

UUIDS = [f"GPU-{index}2345678-9abc" for index in range(3)]
GPUS = [Gpu(index, "H100", uuid) for index, uuid in enumerate(UUIDS)]

RECORDS = [
    record(backend="nccl", gpu=f"{UUIDS[0]}, {UUIDS[1]}"),
    record(backend="nccl", gpu=f"{UUIDS[1]}, {UUIDS[0]}"),
    record(backend="nccl", gpu=UUIDS[0], ranks=1),
    record(backend="data_parallel", gpu=f"{UUIDS[0]}+{UUIDS[1]}", ranks=1),
    record(backend="gloo"),
]


def test_each_gpu_has_its_cases_by_lane_and_its_ranks_and_an_unused_one_is_named() -> None:
    lines = list(gpu_lines(RECORDS, GPUS, 3))
    assert [line.text for line in lines] == [
        "cases by GPU    data_parallel  nccl    ranks that ran on it",
        "GPU 0, H100                 1     3    0, 1",
        "GPU 1, H100                 1     2    0, 1",
        "GPU 2, H100                 –     –    no case used it",
    ]
    assert [line.style for line in lines] == [*[Style.PLAIN] * 3, Style.UNCERTAIN]
    assert not list(gpu_lines([record()], (), 0))


def test_without_nvml_gpus_have_the_names_that_the_ranks_gave_and_unused_ones_are_counted() -> None:
    lines = [line.text for line in gpu_lines(RECORDS, (), 4)]
    assert lines[1:] == [
        "GPU-02345678                1     3    0, 1",
        "GPU-12345678                1     2    0, 1",
        "no case used 2 other CUDA devices, which NVML did not name",
    ]


def test_an_instance_of_a_divided_gpu_counts_for_its_gpu() -> None:
    records = [record(backend="nccl", gpu="MIG-abc"), record(backend="nccl", gpu="MIG-def")]
    (_, row) = gpu_lines(records, [Gpu(0, "A100", "GPU-0", mig_uuids=("MIG-abc", "MIG-def"))], 2)
    assert row.text == "GPU 0, A100        2    0"


def test_a_transport_that_is_not_known_is_said_to_be_unknown() -> None:
    known = Transport({(0, 1): ("P2P/CUMEM",), (1, 0): ("P2P/CUMEM",), (1, 2): ("SHM/direct",)})
    assert transport_line(known, 3).text == (
        "NCCL's transport, in a probe with 3 ranks on one node: P2P/CUMEM for 2 pairs of ranks, "
        "SHM/direct for 1 pair of ranks"
    )
    line = transport_line(Transport({}, "NCCL's log names no transport"), 3)
    assert line.text == "NCCL's transport is not known: NCCL's log names no transport"
    assert line.style is Style.UNCERTAIN


# The page that records a run.


def test_each_run_of_a_day_has_a_page_of_its_own(tmp_path: Path) -> None:
    cpu = Box(Gpus(), 0)
    gpus = Box(Gpus((Gpu(0, "NVIDIA H100 80GB", "GPU-01234567-89ab"),)), 1)
    paths = [write_page(tmp_path, "2026-11-22", cpu, iter(["one"])) for _ in range(2)]
    assert [path.name for path in paths] == ["2026-11-22-cpu.md", "2026-11-22-cpu-2.md"]
    page = write_page(tmp_path, "2026-11-22", gpus, iter(["a", "on GPU-01234567-89ab"]))
    assert page.name == "2026-11-22-1-x-nvidia-h100-80gb.md"
    text = page.read_text()
    assert text.startswith("# 2026-11-22: 1 x NVIDIA H100 80GB, ")
    assert text.endswith("\na\non (UUID)\n")


def test_a_long_list_says_how_many_more_there_are() -> None:
    block = list(suite_run._block("Failed", [str(number) for number in range(LONGEST_BLOCK + 7)]))
    assert block[-2:] == ["... and 7 more", "```"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("No such file: '/srv/site/data.pt'", "No such file: '(path)'"),
        ("at /opt/a/b.py:12 and ~/.cache/torch", "at (path):12 and (path)"),
        ("P2P/CUMEM for 4 pairs, SHM/direct/direct", "P2P/CUMEM for 4 pairs, SHM/direct/direct"),
        ("sums and/or means, 2/3, tests/a.py::b", "sums and/or means, 2/3, tests/a.py::b"),
        ("rank 0 on GPU-01234567-89ab", "rank 0 on (UUID)"),
        ("on box-7, by somebody.", "on (host), by (user)."),
        ("on box-71 and my-box-7", "on box-71 and my-box-7"),
        ("the root cause", "the root cause"),
    ],
)
def test_nothing_private_is_told(monkeypatch: pytest.MonkeyPatch, text: str, left: str) -> None:
    host, user = ("localhost", "root") if "root" in text else ("box-7", "somebody")
    assert {"localhost", "root"} <= set(SAID_OF_ALL)
    monkeypatch.setattr("socket.gethostname", lambda: host)
    monkeypatch.setattr("getpass.getuser", lambda: user)
    assert without_private(text) == left
