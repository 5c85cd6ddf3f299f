"""A fork of a process that has reduced once can reduce again."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = textwrap.dedent(
    """
    import os, signal, sys, torch, torch.distributed as dist
    from ddp_equivalence.observed_scripts.in_script import replayer

    backend = {"backend": sys.argv[2]} if len(sys.argv) > 2 else {}
    store = "file://" + sys.argv[1]
    dist.init_process_group(init_method=store, rank=0, world_size=1, **backend)
    dist.all_reduce(torch.ones(1))
    child = os.fork()
    if not child:
        signal.alarm(30)
        replayer._renew_groups()
        dist.all_reduce(torch.ones(1))
        print("reduced", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    """
)


@pytest.mark.parametrize("backend", ["", "gloo", "cpu:gloo"])
def test_a_fork_reduces_whatever_backend_the_script_names(backend: str, tmp_path: Path) -> None:
    """A script that names none has one for each kind of device."""
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), *backend.split()]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "reduced\n", done.stderr
