"""Scripts that these tests run in forks of one interpreter: nothing else is said of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from ddp_equivalence import observe
from ddp_equivalence.observed_scripts import launch
from ddp_equivalence.observed_scripts.recording import ScriptFailed
from tests.package.observed_scripts.interpreters import ForkedProcess, processes_of, started
from tests.package.observed_scripts.observing import SCRIPTS, observed


@pytest.mark.parametrize("words", [("classifier.py", "clip"), ("adversarial.py",)])
def test_a_fork_gives_what_an_interpreter_gives_that_was_started(words: tuple[str, ...]) -> None:
    command = (sys.executable, *words, "--nprocs", "2")
    with_processes = observe(command, folder=SCRIPTS)
    assert with_processes.verdicts
    assert without_seconds(str(observed(*words))) == without_seconds(str(with_processes))


def without_seconds(report: str) -> list[str]:
    return [line for line in report.splitlines() if not line.strip().startswith("Seconds:")]


def test_a_fork_that_fails_prints_its_error(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import torch\nraise ValueError('no such thing')\n")
    with patch.object(launch, "start", started), pytest.raises(ScriptFailed) as caught:
        observe((sys.executable, "fails.py"), folder=tmp_path)
    assert "exit code 1" in str(caught.value)
    assert str(caught.value).endswith("ValueError: no such thing")


def test_a_fork_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(
        "import os, time\nos.fork()\nopen(f'{os.getpid()}.started', 'w')\ntime.sleep(600)\n"
    )
    environment = {"PYTHONPATH": str(launch.STARTUP), "PATH": ""}
    command = (sys.executable, str(tmp_path / "sleeps.py"))
    with (tmp_path / "output").open("wb") as output:
        process = ForkedProcess(command, cwd=tmp_path, env=environment, stdout=output)
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.started"))) < 2:
        assert time.monotonic() < until, (tmp_path / "output").read_text()
        time.sleep(0.01)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    assert len(processes_of(process.pid)) == 2
    process.kill()
    assert process.wait() < 0
    assert not [one for one in processes_of(process.pid) if one.status() != "zombie"]
