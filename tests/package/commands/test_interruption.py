"""A command that gets SIGTERM, as from a CI job that is cancelled, leaves nothing behind."""

from __future__ import annotations

import getpass
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_equivalence.commands.exit_codes import INTERRUPTED
from ddp_equivalence.commands.output import SIGNALS, Terminated, exit_code_of, sigterm_interrupts
from ddp_equivalence.gate.record import read_record

WAITS = """
import os, time

def test_that_passes():
    pass

def test_that_waits():
    with open("waits", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


USER = getpass.getuser()
KEPT_ON_PURPOSE = {
    f"torchinductor_{USER}",
    f"pytest-of-{USER}",
    f"ddp_equivalence-pytest-cache-{os.getuid()}",
}
"""The folders that torch, pytest and the package keep for their next run."""


@pytest.mark.parametrize(("workers", "to_group"), [("0", True), ("1", False)])
def test_a_record_that_is_ended_has_what_was_done_and_leaves_no_process(
    workers: str, to_group: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    (tmp_path / "temporary").mkdir()
    words = ("record", "out", "--no-suite", "test_waits.py", "-n", workers)
    recording = subprocess.Popen(
        [sys.executable, "-m", "ddp_equivalence", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        process_group=0,
    )
    until = time.monotonic() + 60
    while not (tmp_path / "waits").exists() or not (tmp_path / "waits").read_text():
        assert recording.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    waits = psutil.Process(int((tmp_path / "waits").read_text()))
    if to_group:  # as `timeout` does, which has sent it to the process before
        recording.terminate()
        os.killpg(recording.pid, signal.SIGTERM)
    else:
        recording.terminate()
    assert recording.wait(60) == INTERRUPTED
    psutil.wait_procs([waits], timeout=10)
    assert not waits.is_running()
    record = read_record(tmp_path / "out")
    outcomes = {name.rpartition("::")[2]: test.outcome for name, test in record.tests.items()}
    assert outcomes.pop("test_that_passes") == "passed"
    assert set(outcomes) <= {"test_that_waits"}
    assert record.collected == 2
    assert set(os.listdir(tmp_path / "temporary")) <= KEPT_ON_PURPOSE


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """The meaning that signals have in a new process, and afterwards again."""
    before = {one: signal.signal(one, signal.SIG_DFL) for one in SIGNALS}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("default_sigterm")
def test_sigterm_raises_once_and_is_not_forgotten_if_somebody_catches_it() -> None:
    with sigterm_interrupts() as interruption:
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.terminated
    os.kill(os.getpid(), signal.SIGTERM)  # while the command cleans up


def _waits(began: Any) -> None:
    began.set()
    time.sleep(30)


@pytest.mark.usefixtures("default_sigterm")
def test_a_fork_of_the_users_ends_by_the_signal() -> None:
    with sigterm_interrupts() as interruption:
        context = multiprocessing.get_context("fork")
        began = context.Event()
        fork = context.Process(target=_waits, args=(began,))
        fork.start()
        assert began.wait(30)  # Python forgets a signal that comes while it forks
        fork.terminate()
        fork.join(20)
    assert fork.exitcode == -signal.SIGTERM
    assert not interruption.terminated


@pytest.mark.usefixtures("default_sigterm")
def test_a_child_that_does_not_end_is_killed() -> None:
    deaf = "import os, signal, time\nfor one in (2, 15): signal.signal(one, signal.SIG_IGN)\n"
    ends_its_parent = "os.kill(os.getppid(), 15)\ntime.sleep(600)"
    before = psutil.Process().children()
    with sigterm_interrupts(), pytest.raises(Terminated):
        exit_code_of([sys.executable, "-c", deaf + ends_its_parent], seconds_to_end=0.2)
    assert psutil.Process().children() == before
