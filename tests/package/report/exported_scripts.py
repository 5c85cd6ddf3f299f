"""Run an exported script without this package, or look at the names that it defines."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ddp_equivalence import Case
from ddp_equivalence.reference import big_batch

MINE = """
from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import beside
from ddp_equivalence import Case, Rank

case = Case(
    model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
    batch=lambda generator: torch.randn(12, 3, generator=generator),
    loss=beside.loss,
    layout="2x1",
)

def step(model: nn.Module, rows: torch.Tensor, rank: Rank) -> None:
    assert (rank.node, rank.local_rank, rank.local_world_size) == (rank.rank, 0, 1)
    ddp = DistributedDataParallel(model)
    beside.loss(ddp, rows).backward()
    model[2].bias.grad *= beside.TOO_MUCH

def right(model, rows, rank):
    ddp = DistributedDataParallel(model)
    beside.loss(ddp, rows).backward()
"""

BESIDE = "TOO_MUCH = 1.75\n\ndef loss(model, rows):\n    return model(rows).square().mean()\n"


def torchrun(path: Path, ranks: int) -> tuple[int, str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    without_us = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*launcher, str(path)],
        cwd=path.parent,
        env=without_us,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def by_itself(path: Path) -> dict[str, Any]:
    """The script's own names, without running it; it imports nothing of this package."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.name for one in ast.walk(tree) if isinstance(one, ast.Import) for alias in one.names
    }
    imported |= {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith(("ddp_equivalence", "tests"))]
    names: dict[str, Any] = {"__name__": __name__, "__doc__": "how to run it"}
    exec(compile(tree, str(path), "exec", dont_inherit=True), names)
    return names


def assert_same_big_batch(names: dict[str, Any], case: Case, **options: Any) -> None:
    reference = big_batch(case, **options)
    # A script tells the step in the name, if there are gradients of several steps.
    several = any(step for step, _ in reference.expected)
    expected = {
        f"{name} (step {step + 1})" if several else name: truth
        for (step, name), truth in reference.expected.items()
    }
    computed = names["on_one_device"](torch.float64)
    assert sorted(computed) == sorted(expected)
    for name, truth in expected.items():
        assert (computed[name] is None) == (truth is None)
        assert truth is None or torch.equal(computed[name].to_dense(), truth.to_dense())
