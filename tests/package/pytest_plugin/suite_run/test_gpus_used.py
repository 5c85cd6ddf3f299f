"""The rows that say which GPUs were used, and the line on NCCL's transport."""

from __future__ import annotations

from ddp_equivalence.pytest_plugin.suite_run.gpus_used import (
    gpu_lines,
    most_ranks,
    transport_line,
)
from ddp_equivalence.ranks.gpus import Gpu
from ddp_equivalence.ranks.nccl import Transport
from ddp_equivalence.report.text import Style
from tests.package.pytest_plugin.test_summary_table import record

UUIDS = [f"GPU-{index}2345678-9abc" for index in range(3)]
GPUS = [Gpu(index, "H100", uuid) for index, uuid in enumerate(UUIDS)]

RECORDS = [
    record(backend="nccl", gpu=f"{UUIDS[0]}, {UUIDS[1]}"),
    record(backend="nccl", gpu=f"{UUIDS[1]}, {UUIDS[0]}"),
    record(backend="nccl", gpu=UUIDS[0], ranks=1),
    record(backend="data_parallel", gpu=f"{UUIDS[0]}+{UUIDS[1]}", ranks=1),
    record(backend="nccl", gpu=UUIDS[2], outcome="unknown"),
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


def test_a_run_on_the_cpu_says_nothing_of_gpus() -> None:
    assert not list(gpu_lines([record()], (), 0))


def test_the_probe_has_as_many_ranks_as_the_largest_case_on_nccl() -> None:
    assert (most_ranks(RECORDS, "nccl"), most_ranks(RECORDS, "nccl2")) == (2, 0)


def test_a_transport_that_is_not_known_is_said_to_be_unknown() -> None:
    known = Transport({(0, 1): ("P2P/CUMEM",), (1, 0): ("P2P/CUMEM",), (1, 2): ("SHM/direct",)})
    assert transport_line(known, 3).text == (
        "NCCL's transport, in a probe with 3 ranks on one node: P2P/CUMEM for 2 pairs of ranks, "
        "SHM/direct for 1 pair of ranks"
    )
    line = transport_line(Transport({}, "NCCL's log names no transport"), 3)
    assert line.text == "NCCL's transport is not known: NCCL's log names no transport"
    assert line.style is Style.UNCERTAIN
