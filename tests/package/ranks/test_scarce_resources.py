"""Where disk, memory, processes or file descriptors are scarce, checks work or fail clearly."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ddp_equivalence import Rank, check
from tests.package.own_cases import own_case, right_step
from tests.package.ranks.marked_run import MarkedRun
from tests.package.ranks.user_tests import TRAINS, write_tests
from tests.package.someone_elses_run import environment, run

FILLS_ITS_FOLDER = """
def test_fills_its_temporary_folder():
    with open(tempfile.gettempdir() + "/full", "wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(2**10))
"""

RAISES = """
def raises(model, rows, rank):
    raise ValueError("no such thing")

def test_raises():
    with pytest.raises(RankFailed, match="no such thing"):
        assert_equivalent(case("1x2"), raises)
"""

SURROUNDINGS = """
    hostname no-such-host.invalid
    mount -t tmpfs -o size=64k none "$TMPDIR"
    mount -t tmpfs -o size=64k none /dev/shm
"""
"""Shell commands. The sizes are in bytes; the host name is one that no name server knows."""

FULL_DISKS = """
    mount -t tmpfs -o size=64k none /tmp
    mount -o bind /tmp /var/tmp
    cp *.py /tmp
    cd /tmp
    yes > full
    export TMPDIR=/tmp EVENTS=/dev/null
"""
"""Shell commands that fill every folder where Python makes temporary files, and use one of them."""


def run_after(user_run: MarkedRun, changes: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a run after these shell commands.

    It has mounts, a network and a host name of its own; the network has only the loopback.
    """
    isolated = ["unshare", "--mount", "--net", "--uts"]
    shell = [*isolated, "sh", "-c", f'ip link set lo up || exit\n{changes}\nexec "$@"', "sh"]
    skip_unless_permitted([*shell, "true"], user_run)
    return run(
        user_run.folder, *arguments, before=shell, more=user_run.environment, own_processes=True
    )


def skip_unless_permitted(command: list[str], user_run: MarkedRun) -> None:
    """Skip the test where the system does not permit what this command does."""
    try:
        done = subprocess.run(
            command,
            cwd=user_run.folder,
            env=environment(user_run.environment),
            capture_output=True,
            check=False,
        )
        reason = done.stderr.decode().strip() if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"not permitted here: {reason}")


def test_checks_work_with_little_room_and_no_network(user_run: MarkedRun) -> None:
    write_tests(user_run, "1x2", tests=FILLS_ITS_FOLDER + RAISES + TRAINS)
    code, text = run_after(user_run, SURROUNDINGS)
    assert code == 0, text
    assert not user_run.left_behind()


def test_checks_work_where_the_path_of_temporary_files_is_too_long_for_a_socket(
    user_run: MarkedRun,
) -> None:
    """The path of a socket may have 107 bytes on Linux, where a file's may have 4,095."""
    long_path = user_run.folder / ("a" * 120)
    long_path.mkdir()
    write_tests(user_run, "1x2")
    more = user_run.environment | {"TMPDIR": str(long_path)}
    code, text = run(user_run.folder, more=more, own_processes=True)
    assert code == 0, text
    assert not user_run.left_behind()


def test_full_disks_are_a_clear_error(user_run: MarkedRun) -> None:
    for needed in (sys.prefix, sys.base_prefix, str(Path(__file__).resolve())):
        if needed.startswith(("/tmp/", "/var/tmp/")):
            pytest.skip(f"{needed} would be hidden by the full disks of this test")
    write_tests(user_run, "1x2")
    code, text = run_after(user_run, FULL_DISKS, "--capture=no")  # pytest captures into files
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "Not compared: a rank failed" in text
    assert "2 ranks could not be started: [Errno 2] No usable temporary directory" in text
    assert not user_run.left_behind()


def run_limited(user_run: MarkedRun, *limits: str) -> tuple[int, str]:
    """Exit status and output of a run within these limits.

    It runs as a user of its own, since the limit on processes counts all processes of the user.
    """
    user = ["setpriv", "--reuid=61234", "--clear-groups"]
    capabilities = ["--inh-caps=-all,+dac_override", "--ambient-caps=+dac_override"]
    before = [*user, *capabilities, "prlimit", *limits, "--"]
    skip_unless_permitted([*before, "true"], user_run)
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    more = user_run.environment | threads
    return run(user_run.folder, before=before, more=more, own_processes=True)


HOLDS_FILES = """
HELD = [open(os.devnull) for _ in range(150)]
"""


def test_idle_ranks_make_room_where_descriptors_are_few(user_run: MarkedRun) -> None:
    """30 ranks need 6 descriptors each, but this process has only about 100 to spare."""
    layouts = ("1x2", "1x4", "2x2", "1x8", "2x4", "1+3")
    write_tests(user_run, *layouts, tests=HOLDS_FILES + TRAINS)
    code, text = run_limited(user_run, "--nofile=256")
    assert code == 0, text
    assert "Traceback" not in text  # the fork server has not failed in the middle of a start
    assert not user_run.left_behind()


def test_too_little_room_for_one_set_of_ranks_is_a_clear_error(user_run: MarkedRun) -> None:
    write_tests(user_run, "1x4")
    code, text = run_limited(user_run, "--nproc=5")
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "Not compared: a rank failed" in text
    assert "4 ranks could not be started: [Errno 11] the fork server has ended" in text
    assert not user_run.left_behind()


def test_a_rank_that_cannot_join_the_group_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    verdict = check(own_case(), right_step)
    assert verdict.failure is not None
    assert "nowhere0" in verdict.failure.ends[0].what


def asks_for_memory(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        limit_memory()
        bytearray(2**30)
    right_step(model, shard, rank)


def asks_for_a_large_tensor(model: nn.Module, shard: Any, rank: Rank) -> None:
    if rank.rank == 1:
        limit_memory()
        torch.zeros(2**30)
    right_step(model, shard, rank)


def limit_memory() -> None:
    """Let this process use 64 MiB more than it does now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    soft_limit = pages * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))


@pytest.mark.parametrize(
    ("step", "message"),
    [(asks_for_memory, "MemoryError"), (asks_for_a_large_tensor, "can't allocate memory")],
)
def test_a_rank_without_memory_is_the_root_cause_and_the_next_case_is_right(
    step: Any, message: str
) -> None:
    verdict = check(own_case(), step)
    assert verdict.failure is not None
    assert verdict.failure.ends[0].rank == 1
    assert message in verdict.failure.ends[0].what
    assert check(own_case(), right_step).outcome == "same"


@pytest.mark.parametrize("server_ends", [True, False], ids=["ended", "alive"])
def test_a_folder_of_the_socket_that_is_tidied_up_is_made_again(server_ends: bool) -> None:
    """By a program that deletes what is old in /tmp, or by a server that has ended."""
    assert check(own_case(), right_step, fresh_ranks=True).outcome == "same"
    folder = Path(util.get_temp_dir())
    if server_ends:
        ended = server_process()
        os.kill(ended, signal.SIGKILL)
        while psutil.pid_exists(ended) and psutil.Process(ended).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    shutil.rmtree(folder)
    for _ in range(2):
        assert check(own_case(), right_step, fresh_ranks=True).outcome == "same"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def server_process() -> int:
    pid: int = getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009
    return pid
