"""Run an exported script without this package, or look at the names that it defines."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from ddp_equivalence import Case
from ddp_equivalence.reference import big_batch
from tests.package.forks import completed
from tests.package.someone_elses_run import LONGEST

MINE = """
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


NOT_HERE = """
import sys

class NotHere:
    def find_spec(self, name, path, target=None):
        if name == "ddp_equivalence":
            raise ImportError("the script must not import the package")

sys.meta_path.insert(0, NotHere())
for name in [name for name in sys.modules if name.partition(".")[0] == "ddp_equivalence"]:
    del sys.modules[name]  # of a fork
"""
"""Python imports this file when it starts. It hides this package from the script."""


def torchrun(path: Path, ranks: int, forked: bool = True) -> tuple[int, str]:
    """Exit code and output of the script. ``forked``: its ranks are forks of one interpreter."""
    with tempfile.TemporaryDirectory() as hiding:
        Path(hiding, "sitecustomize.py").write_text(NOT_HERE)
        variables = {**os.environ, "PYTHONPATH": hiding}
        if forked:
            command = [sys.executable, str(path)]
            done = completed(command, path.parent, variables, LONGEST, ranks=ranks)
        else:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            done = subprocess.run(
                [sys.executable, *launcher, str(path)],
                cwd=path.parent,
                env=variables,
                capture_output=True,
                text=True,
                timeout=LONGEST,
                check=False,
            )
    return done.returncode, done.stdout + done.stderr


def by_itself(path: Path) -> dict[str, Any]:
    """The script's own names, without running it; it imports its own files and nothing of ours."""
    script = ModuleType("script", "how to run it")
    tree = ast.parse(path.read_text())
    (files,) = (
        ast.literal_eval(one.value)
        for one in tree.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "FILES"
    )
    own = {
        script.__name__,
        "ddp_equivalence",
        "tests",
        *(Path(name).parts[0].removesuffix(".py") for name in files),
    }
    kept = _take_out(own)
    sys.modules[script.__name__] = script
    try:
        with patch.object(sys, "path", [*sys.path]):
            exec(compile(tree, str(path), "exec", dont_inherit=True), vars(script))
    finally:
        imported = _take_out(own)
        sys.modules.update(kept)
    for name, module in imported.items():
        file = getattr(module, "__file__", None)
        assert file is None or Path(file).is_relative_to(vars(script)["FOLDER"]), name
    return vars(script)


def _take_out(packages: set[str]) -> dict[str, ModuleType]:
    """The modules of these packages, which are no longer imported."""
    found = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in found}


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
