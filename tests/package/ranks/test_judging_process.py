"""The judging process joins no group, is not run again, can be forked, and may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist

from ddp_equivalence import check
from ddp_equivalence.ranks.warm_ranks import warm_ranks
from tests.package.own_cases import own_case, right_step


def test_the_judging_process_is_in_no_group_and_does_not_touch_cuda() -> None:
    warm_ranks().stop()  # idle ranks of an earlier check with in_process hold this process's group
    assert check(own_case(), right_step).outcome == "same"
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import os, signal
from ddp_equivalence import check
from tests.package.own_cases import own_case
from torch.nn.parallel import DistributedDataParallel

offset = 0.0

def step(model, shard, rank):
    print(os.getpid())
    ddp = DistributedDataParallel(model)
    (((ddp(shard["rows"]) - shard["targets"]) ** 2).mean() + offset).backward()

verdict = check(own_case(), step)
print(verdict.outcome, *map(str.strip, verdict.output.values()), flush=True)
"""


def run(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    # The temporary folder is not below the test's own: a socket's name has at most 107 characters.
    with TemporaryDirectory() as temporary:
        return subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=120,
            check=False,
            env=dict(os.environ) | {"TMPDIR": temporary},
        )


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "same"
    assert done.stdout.count("same") == 1


FORKS = """
import torch
torch.set_num_threads(1)
child = os.fork()
print("forked", check(own_case(), step).outcome, flush=True)
if child == 0:
    from ddp_equivalence.ranks.warm_ranks import warm_ranks
    warm_ranks().stop()
    os._exit(0)
print("child ended with", os.waitpid(child, 0)[1])
print("after", check(own_case(), step).outcome)
"""


def test_a_fork_of_the_judging_process_has_ranks_of_its_own(tmp_path: Path) -> None:
    """Pytest --forked forks it, and so does a DataLoader, whose workers must not keep its ranks."""
    done = run(SCRIPT + FORKS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked same") == 2, done.stdout + done.stderr
    assert "child ended with 0\nafter same" in done.stdout


KILLS_THE_JUDGING_PROCESS = """
os.environ["JUDGING_PROCESS"] = str(os.getpid())

def kills_the_judging_process(model, shard, rank):
    import pathlib, time
    pathlib.Path(f"rank{rank.rank}").write_text(str(os.getpid()))
    torch.distributed.barrier()
    if rank.rank == 0:
        os.kill(int(os.environ["JUDGING_PROCESS"]), signal.SIGKILL)
    time.sleep(100)

import torch
check(own_case(), kills_the_judging_process)
"""


def test_ranks_at_work_end_with_a_judging_process_that_is_killed(tmp_path: Path) -> None:
    done = run(SCRIPT + KILLS_THE_JUDGING_PROCESS, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    process_ids = [int((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    until = time.monotonic() + 20
    while any(map(psutil.pid_exists, process_ids)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, process_ids))
