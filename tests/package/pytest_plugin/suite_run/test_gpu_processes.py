"""What the plan says of processes on GPUs."""

from __future__ import annotations

import pytest

from ddp_equivalence.pytest_plugin.suite_run import plugin
from ddp_equivalence.pytest_plugin.suite_run.plugin import process_lines
from ddp_equivalence.ranks.gpu_room import GpuRoom

HELD = (
    "  An idle process holds about 600 MiB of its GPU's memory (an estimate; it was not measured)"
)


def lines(monkeypatch: pytest.MonkeyPatch, room: GpuRoom, *devices: str) -> list[str]:
    monkeypatch.setattr(plugin, "cuda_devices", lambda: devices)
    monkeypatch.setattr(plugin, "gpu_room", lambda: room)
    return list(process_lines())


def test_gpus_with_one_limit_have_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(monkeypatch, GpuRoom({"0": 34, "1": 34}), "0", "1") == [
        "Processes: at most 34 at once on each GPU; idle ones end when others need their place",
        HELD,
    ]


def test_a_gpu_for_one_process_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    room = GpuRoom({"0": 34, "1": 34, "2": 34}, frozenset({"1"}))
    assert lines(monkeypatch, room, "0", "1", "2") == [
        "Processes: at most 1 at once on CUDA device 1, as its compute mode demands; idle ones end "
        "when others need their place",
        "Processes: at most 34 at once on CUDA devices 0, 2; idle ones end when others need their "
        "place",
        HELD,
    ]


def test_a_machine_without_gpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not lines(monkeypatch, GpuRoom({}))
