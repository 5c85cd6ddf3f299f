"""What goes wrong with an upgrade, planted in a copy of this package: the gate is red for it.

The copy runs a few of the suite's own tests before and after an edit, as ``record`` and ``gate``
are called by a user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_equivalence.commands.suite_folder import suite_folder
from tests.package.gate.records import found, judged, read

WORDS = "test_ddp_mean_gives and (1x2 or 2x2-equal) and (linear or frozen or mlp-mse) and not exact"

pytestmark = pytest.mark.thorough
"""Each takes up to half a minute. In every change test_gate.py tests the finding of every kind from
two records, and test_record_and_gate.py the way from a step to a red gate.
"""

STEP = "        task.loss(ddp, shard).backward()\n"
TEST = "tests/equivalence/test_ddp.py"
DDP_MEAN = "ddp_equivalence/strategies/ddp_mean.py"

OTHER_BUCKETS = """
import torch.nn.parallel.distributed as distributed

initialise = distributed.DistributedDataParallel.__init__
parameters = list(initialise.__code__.co_varnames[1 : initialise.__code__.co_argcount])
first = len(parameters) - len(initialise.__defaults__)
defaults = list(initialise.__defaults__)
defaults[parameters.index("bucket_cap_mb") - first] = 50
initialise.__defaults__ = tuple(defaults)
"""


@dataclass(frozen=True)
class Regression:
    """``file``: to edit, or to add if ``old`` is empty. ``old`` becomes ``new`` in it. ``kind``:
    the red finding that says so. ``of``: a part of what it is about.
    """

    file: str
    old: str
    new: str
    kind: str
    of: str


REGRESSIONS = {
    "a strategy computes something else": Regression(
        DDP_MEAN, STEP, STEP.replace("backward()", "mul(2).backward()"), "verdict_worse", "frozen"
    ),
    "an error that is within the limit, and far beyond rounding": Regression(
        DDP_MEAN, STEP, STEP.replace("backward()", "mul(1 + 2.0**-47).backward()"), "error_grew", ""
    ),
    "the tolerance is loosened": Regression(
        "ddp_equivalence/comparison/tolerance.py",
        "torch.float64: 256.0",
        "torch.float64: 2560.0",
        "limit_grew",
        "frozen",
    ),
    "a case is deleted": Regression(
        "ddp_equivalence/strategies/catalogue.py",
        '        yield Trial(case, strategy.name, compare="update")\n        if',
        "        if",
        "vanished",
        "update",
    ),
    "tests are skipped": Regression(
        TEST,
        '@pytest.mark.promise_of("ddp_mean")\n',
        '@pytest.mark.skip(reason="flaky")\n@pytest.mark.promise_of("ddp_mean")\n',
        "stopped_running",
        "frozen",
    ),
    "a test asks for less": Regression(
        TEST,
        "    assert_equivalent(trial.case, trial.strategy, **trial.options)\n",
        "    assert_equivalent(trial.case, 'manual_all_reduce_mean', **trial.options)\n",
        "compared_less",
        "frozen",
    ),
    "a step takes longer": Regression(
        DDP_MEAN,
        STEP,
        f'        sum(range(60_000_000 if task.case.model == "frozen" else 0))\n{STEP}',
        "slower",
        "frozen",
    ),
    "torch has another default": Regression(
        "sitecustomize.py", "", OTHER_BUCKETS, "default_changed", "bucket_cap_mb"
    ),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and its suite, with a record of it in the folder ``before``."""
    copy = tmp_path_factory.mktemp("original")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("ddp_equivalence", "tests/equivalence", "tests/difference"):
        shutil.copytree(suite_folder() / name, copy / name, ignore=ignored)
    for name in ("conftest.py", "pytest.ini", "tests/diagnosis/test_planted_faults.py"):
        (copy / name).parent.mkdir(exist_ok=True)
        shutil.copy(suite_folder() / name, copy / name)
    shutil.copy(suite_folder() / "tests" / "__init__.py", copy / "tests")
    record(copy, copy / "before")
    return copy


def record(package: Path, out: Path) -> None:
    """Record the few tests that the copy of the package in this folder has."""
    run = subprocess.run(
        [sys.executable, "-m", "ddp_equivalence", "record", str(out), "-k", WORDS],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "This run is recorded in" in run.stdout, run.stdout + run.stderr


def test_without_an_edit_nothing_is_red(original: Path, tmp_path: Path) -> None:
    record(original, tmp_path / "after")
    judgement = judged(original / "before", tmp_path / "after")
    assert judgement.compared >= 4
    assert [str(one) for one in judgement.findings if one.level == "red"] == []


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_regression_is_red_for_what_it_is(original: Path, tmp_path: Path, name: str) -> None:
    regression = REGRESSIONS[name]
    edited = tmp_path / "edited"
    shutil.copytree(original, edited, ignore=shutil.ignore_patterns("before", "__pycache__"))
    file = edited / regression.file
    text = file.read_text() if regression.old else ""
    assert regression.old in text
    file.write_text(text.replace(regression.old, regression.new, 1) or regression.new)
    record(edited, tmp_path / "after")
    judgement = judged(original / "before", tmp_path / "after")
    reds = [one for one in found(judgement) if one[0] == "red"]
    assert any(kind == regression.kind and regression.of in of for _, kind, of in reds), reds
    others = {kind for _, kind, _ in reds} - {regression.kind}
    assert others <= {"test_failed", "nothing_compared"}, reds  # and for nothing else
    assert read(tmp_path / "after").end is not None
