"""The judging process joins no group, and is not run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_equivalence import check
from tests.package.own_cases import own_case, right_step


@pytest.mark.usefixtures("as_if_alone")  # idle ranks with rank 0 in process hold its group
def test_the_judging_process_is_in_no_group_and_does_not_touch_cuda() -> None:
    assert check(own_case(), right_step).outcome == "same"
    assert not dist.is_initialized()
    assert not torch.cuda.is_initialized()


SCRIPT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import os
from ddp_equivalence import check
from tests.package.own_cases import own_case
from torch.nn.parallel import DistributedDataParallel

def step(model, shard, rank):
    print(os.getpid())
    ddp = DistributedDataParallel(model)
    ((ddp(shard["rows"]) - shard["targets"]) ** 2).mean().backward()

verdict = check(own_case(), step)
print(verdict.outcome, *map(str.strip, verdict.output.values()), flush=True)
"""


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "same"
    assert done.stdout.count("same") == 1
