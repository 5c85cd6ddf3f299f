"""The line of progress stands below pytest's output, and leaves no trace in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_equivalence.pytest_plugin.suite_run.plan import PlannedTest, Timings
from ddp_equivalence.pytest_plugin.suite_run.plugin import Pace, can_show
from tests.package.pytest_plugin.suite_run.screen import Screen
from tests.package.someone_elses_run import LONGEST, command, environment

WIDTH, HEIGHT = 60, 12

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(50))
def test_it(number):
    print("captured")

def test_explains_a_difference_for_long():
    from ddp_equivalence.diagnosis import time_left
    time_left._showers[-1]("short")

def test_fails():
    assert 0, "on purpose"

def test_with_a_name_so_long_that_it_takes_more_than_one_row_of_a_narrow_terminal():
    pass
"""

PROGRESS = re.compile(r"\d+ of 53 tests, about \d+ s left")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_many.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


class TerminalRun:
    """A run of pytest in a terminal of its own. It starts at once."""

    def __init__(self, folder: Path, terminal: str, *arguments: str) -> None:
        self._controller, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self._process = subprocess.Popen(
            command("--ddp-suite-run", *arguments),
            cwd=folder,
            env=environment({"TERM": terminal, "COLUMNS": str(WIDTH)}),
            stdin=subprocess.DEVNULL,
            stdout=side,
            stderr=side,
            start_new_session=True,
        )
        os.close(side)

    def written(self) -> str:
        """All that it has written, once it has ended."""
        parts = []
        while True:
            try:
                part = os.read(self._controller, 1 << 16)
            except OSError:  # Linux says so at the end
                break
            if not part:
                break
            parts.append(part)
        os.close(self._controller)
        assert self._process.wait(timeout=LONGEST) == 1
        return b"".join(parts).decode()


def shown(written: str) -> list[str]:
    """The lines on the screen, without times: with a longer one, pytest writes fewer ``=``."""
    screen = Screen(WIDTH, HEIGHT)
    screen.write(written)
    lines = [re.sub(r"\d+\.\d+s|about \d+ s", "(time)", line) for line in screen.lines]
    lines = [re.sub(r"^=+ (.*\(time\).*) =+$", r"= \1 =", line) for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return lines


@pytest.mark.parametrize("arguments", [(), ("-v",)], ids=["dots", "verbose"])
def test_what_remains_on_the_screen_is_what_pytest_wrote(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    with_line = TerminalRun(folder, "xterm", *arguments)
    without_line = TerminalRun(folder, "dumb", *arguments)
    text, text_without = with_line.written(), without_line.written()
    assert len(set(PROGRESS.findall(text))) > 10
    assert not PROGRESS.search(text_without)
    assert shown(text).count("short") == 1
    assert "[100%]" in "".join(shown(text_without))
    assert shown(text) == shown(text_without)


def test_the_controller_of_workers_shows_it_too(folder: Path) -> None:
    text = TerminalRun(folder, "xterm", "-n", "1").written()
    assert PROGRESS.search(text)
    left = [line for line in shown(text) if " of 53 tests" in line]
    assert not left, "\n".join(left)
    plan = "Plan: 53 other tests"
    assert [line for line in shown(text) if line.startswith("Plan")] == [plan]


@pytest.mark.parametrize(
    ("changes", "is_shown"),
    [
        ({}, True),
        ({"TERM": "dumb"}, False),
        ({"terminal": False}, False),
        ({"verbose": -1}, False),
        ({"verbose": 1}, True),
        ({"capture": "no"}, False),
        ({"log_cli": True}, False),
        ({"log_cli_level": "INFO"}, False),
        ({"blocked": True}, False),
    ],
    ids=str,
)
def test_it_is_not_shown_where_it_would_be_in_the_way(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_shown: bool
) -> None:
    values = {"verbose": 0, "capture": "fd", "log_cli": False, "log_cli_level": None} | changes
    config: Any = SimpleNamespace(
        option=SimpleNamespace(verbose=values["verbose"]),
        getoption=values.get,
        getini=values.get,
        pluginmanager=SimpleNamespace(is_blocked=lambda name: changes.get("blocked", False)),
    )
    stdout = SimpleNamespace(isatty=lambda: changes.get("terminal", True))
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setenv("TERM", changes.get("TERM", "xterm"))
    shown = can_show(config)
    monkeypatch.undo()
    assert shown is is_shown


def test_the_time_left_follows_the_pace_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tests = [PlannedTest(str(number), "s", "1x2", "nccl") for number in range(100)]
    pace = Pace(tests, Timings({("nccl", 2): 1.0}, "this machine", "2026-11-22"), workers=2)
    assert pace.text("0") == "0 of 100 tests, lane nccl"
    pace.finished("0")
    pace.finished("0")  # xdist may run a test again when a worker has died
    assert pace.text("1") == "1 of 100 tests, lane nccl, about 50 s left"
    for number in range(1, 50):
        pace.finished(str(number))
    now[0] += 300  # it takes six times as long as expected, and twelve times with two workers
    assert pace.text("50") == "50 of 100 tests, lane nccl, about 5 min left"
    assert pace.text("of no known lane") == "50 of 100 tests, about 5 min left"
