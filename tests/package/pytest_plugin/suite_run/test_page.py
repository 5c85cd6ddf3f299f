"""The page that records a run: what it says, and what it does not tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plugin import (
    LONGEST_LIST,
    Ran,
    page_lines,
    without_private,
    write,
)
from ddp_equivalence.ranks.gpus import Gpu, Gpus
from ddp_equivalence.report.machine import Box

CPU = Box(Gpus(), 0)
GPUS = Box(Gpus((Gpu(0, "NVIDIA H100 80GB", "GPU-01234567-89ab"),)), 1)


def ran(**changes: Any) -> Ran:
    fields: dict[str, Any] = {
        **{"date": "2026-11-22", "seconds": 61.4, "workers": 2, "exit_code": 1},
        **{"counts": {"passed": 5, "failed": 1}, "plan": ["Plan: 6 tests"]},
        **{"table": ["ddp_mean   5   same"], "failed": ["tests/a.py::test_b"]},
    }
    return Ran(**(fields | changes))


def test_the_page_has_the_machine_the_plan_the_table_and_what_failed() -> None:
    text = "\n".join(page_lines(GPUS, ran()))
    assert text.startswith("# 2026-11-22: 1 x NVIDIA H100 80GB, ")
    assert (
        "The run took 61 s with 2 pytest workers: 5 passed, 1 failed.\nIts exit code is 1." in text
    )
    for line in ("Plan: 6 tests", "ddp_mean   5   same", "tests/a.py::test_b"):
        assert f"\n{line}\n" in text
    assert "GPU 0: NVIDIA H100 80GB" in text
    assert "GPU-0" not in text
    assert "did not pass" not in "\n".join(page_lines(GPUS, ran(failed=[])))


def test_a_long_list_of_failed_tests_says_how_many_more_there_are() -> None:
    failed = [f"test_{number}" for number in range(LONGEST_LIST + 7)]
    assert "... and 7 more" in list(page_lines(CPU, ran(failed=failed)))


def test_each_run_of_a_day_has_a_page_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    names = [write(folder, CPU, ran()).name for _ in range(3)]
    assert names == ["2026-11-22-cpu.md", "2026-11-22-cpu-2.md", "2026-11-22-cpu-3.md"]
    assert write(folder, GPUS, ran()).name == "2026-11-22-1-x-nvidia-h100-80gb.md"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("No such file: '/srv/site/data.pt'", "No such file: '(path)'"),
        ("at /opt/a/b.py:12 and ~/.cache/torch", "at (path):12 and (path)"),
        ("P2P/CUMEM for 4 pairs, SHM/direct/direct", "P2P/CUMEM for 4 pairs, SHM/direct/direct"),
        (
            "sums and/or means, 2/3 done, tests/a.py::b",
            "sums and/or means, 2/3 done, tests/a.py::b",
        ),
        ("rank 0 on GPU-01234567-89ab", "rank 0 on (UUID)"),
        ("on box-7, by somebody.", "on (host), by (user)."),
        ("on box-71 and my-box-7", "on box-71 and my-box-7"),
    ],
)
def test_nothing_private_is_told(monkeypatch: pytest.MonkeyPatch, text: str, left: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box-7")
    monkeypatch.setattr("getpass.getuser", lambda: "somebody")
    assert without_private(text) == left


def test_names_that_tell_nothing_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    monkeypatch.setattr("getpass.getuser", lambda: "root")
    assert without_private("Root cause: the root cause") == "Root cause: the root cause"
