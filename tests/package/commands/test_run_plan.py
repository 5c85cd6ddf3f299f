"""``ddp-equivalence run``: its plan before the tests, the lanes that must run, and the page."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_equivalence.commands.run import _must_run
from ddp_equivalence.pytest_plugin.suite_run import SAID_OF_ALL
from ddp_equivalence.ranks import lanes
from tests.package.commands.test_command_line import A_FEW, ROOT
from tests.package.someone_elses_run import PLUGINS

SERVER = """
import warnings
from multiprocessing import forkserver

def pytest_configure(config):
    warnings.warn("of another plugin, as of pytest-benchmark where xdist is used")

def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        print("server:", forkserver._forkserver._forkserver_pid is not None)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``ddp-equivalence run`` as it is started in the folder, from which pytest has plugins too."""
    return subprocess.run(
        [sys.executable, "-m", "ddp_equivalence", "run", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **PLUGINS, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
    )


@pytest.mark.usefixtures("no_cuda")
def test_the_plan_is_printed_and_nothing_runs(tmp_path: Path) -> None:
    """A warning of another plugin does not end it. In the package's own tests it is an error."""
    (tmp_path / "says_server.py").write_text(SERVER)
    done = run(
        *(tmp_path, "--plan", "-n", "2", "-p", "says_server", "-p", "no:randomly"),
        *("--json", "results.json", "--must-run", "gloo_fallback"),
        *(A_FEW, "-k", "contrastive-1x2 or contrastive-2x4"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^Machine: .*no GPU.*, \d+ CPU cores?, ", done.stdout, re.MULTILINE)
    counted = re.search(
        r"^Plan: (\d+) tests, of which 1 will not run\n"
        r"  gloo_fallback  (\d+) cases on 2 to 8 ranks: needs 2 CUDA devices .*, found 0$",
        done.stdout,
        re.MULTILINE,
    )
    assert counted, done.stdout
    assert int(counted[1]) == int(counted[2]) + 1 > 5
    not_run = "  NOT RUN        1 case on gloo_cuda: needs 1 CUDA device, found 0"
    assert not_run in done.stdout.splitlines()
    assert "passed" not in done.stdout
    assert "compared with one big batch" not in done.stdout
    assert "server: False" in done.stdout
    assert not (tmp_path / "results.json").exists()


@pytest.mark.usefixtures("no_cuda")
def test_a_plan_of_a_file_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    done = run(tmp_path, "--plan", "test_broken.py")
    assert done.returncode != 0, done.stdout
    assert "no_such_module" in done.stdout


@pytest.mark.usefixtures("no_cuda")
def test_a_run_with_workers_is_recorded_with_its_plan_without_private_names(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    done = run(records, "--record", ".", "-n", "1", A_FEW, "-k", "contrastive-1x1")
    assert done.returncode == 0, done.stdout + done.stderr
    after = done.stdout.partition("compared with one big batch")[2]
    (page,) = records.iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-cpu\.md", page.name)
    assert f"This run is recorded in {page}" in after
    text = page.read_text()
    assert "with one pytest worker: 1 passed.\nIts exit code is 0.\n" in text
    assert "Plan: 1 test\n  gloo_fallback  1 case on 1 rank: needs 1 CUDA device" in text
    assert "1 case compared with one big batch" in text
    # A container may be called localhost, or have / as its home, which are nobody's names.
    for private in {str(Path.home()), str(tmp_path), socket.gethostname()} - {"/", *SAID_OF_ALL}:
        assert not re.search(rf"(?<![\w-]){re.escape(private)}(?![\w-])", text)


ONE_RANK_EACH = ("nccl", "data_parallel", "gloo_cuda")
SHARED = ("nccl_shared", "data_parallel_shared")


@pytest.mark.parametrize(
    ("gpus", "demanded"),
    [
        (0, {"nccl"}),  # it fails, and says that there is no GPU
        (1, {"nccl", "gloo_cuda", *SHARED}),
        (2, {*ONE_RANK_EACH, *SHARED}),
        (4, {*ONE_RANK_EACH, *SHARED}),
        (8, {*ONE_RANK_EACH}),
    ],
)
def test_gpu_demands_what_this_machine_can_run(
    gpus: int, demanded: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "cuda_devices", lambda: tuple(map(str, range(gpus))))
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: True)
    assert set(_must_run(["gpu"])) == demanded
    assert list(_must_run(["emulated"])) == ["emulated"]


def test_ranks_that_cannot_share_are_not_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "cuda_devices", lambda: ("0",))
    monkeypatch.setattr(lanes, "why_not_shared", lambda ranks, devices: "EXCLUSIVE_PROCESS")
    assert set(_must_run(["gpu"])) == {"nccl", "data_parallel_shared", "gloo_cuda"}
