"""A command that gets SIGTERM, as from a CI job that is cancelled, leaves nothing behind."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_equivalence.commands.exit_codes import INTERRUPTED
from ddp_equivalence.commands.interruption import Terminated, exit_code_of, sigterm_interrupts
from ddp_equivalence.gate.recorded import read_record

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


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_record_that_is_ended_has_what_was_done_and_leaves_no_process(
    workers: str, tmp_path: Path
) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    (tmp_path / "temporary").mkdir()
    words = ("record", "out", "--no-suite", "test_waits.py", "-n", workers)
    recording = subprocess.Popen(
        [sys.executable, "-m", "ddp_equivalence", *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
    )
    until = time.monotonic() + 60
    while not (tmp_path / "waits").exists() or not (tmp_path / "waits").read_text():
        assert recording.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    waits = psutil.Process(int((tmp_path / "waits").read_text()))
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


def test_sigterm_raises_only_where_it_has_no_other_meaning() -> None:
    with sigterm_interrupts(), pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    got = list[int]()
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        with sigterm_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_equivalence.commands.interruption.SECONDS_TO_END", 0.2)
    deaf = "import os, signal, time\nfor one in (2, 15): signal.signal(one, signal.SIG_IGN)\n"
    ends_its_parent = "os.kill(os.getppid(), 15)\ntime.sleep(600)"
    before = psutil.Process().children()
    with sigterm_interrupts(), pytest.raises(Terminated):
        exit_code_of([sys.executable, "-c", deaf + ends_its_parent])
    assert psutil.Process().children() == before
