"""Settings of a helper module reach the ranks in a run as users start one, whatever imports it."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.package import someone_elses_run
from tests.package.forks import completed
from tests.package.one_server import with_server_of_these_tests

HELPER = """
import torch.distributed as dist

AVERAGE = True


def reduce_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if AVERAGE:
            parameter.grad /= dist.get_world_size()
"""

CASE = """
import torch
from torch import nn
from ddp_equivalence import Case


def loss(model, batch):
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


def make_batch(generator):
    return {
        "rows": torch.randn(12, 5, generator=generator),
        "targets": torch.randn(12, 3, generator=generator),
    }


case = Case(model=lambda: nn.Linear(5, 3), batch=make_batch, loss=loss, layout="1x2")


def step(model, shard, rank):
    loss(model, shard).backward()
    reduce_gradients(model)
"""

TESTS = """
import pytest
import helpers.train
from helpers.train import reduce_gradients
from ddp_equivalence import check
"""

TESTS_END = """

def test_same(equivalence):
    equivalence.assert_equivalent(case, step)


def test_summed(equivalence, monkeypatch):
    monkeypatch.setattr(helpers.train, "AVERAGE", False)
    verdict = check(case, step)
    assert verdict.cause == "sum_not_mean", str(verdict)


def test_never_reduced(monkeypatch):
    monkeypatch.setattr(helpers.train, "reduce_gradients", lambda model: None)

    def their_step(model, shard, rank):
        loss(model, shard).backward()
        helpers.train.reduce_gradients(model)

    verdict = check(case, their_step)
    assert verdict.outcome != "same", str(verdict)


def test_same_again(equivalence):
    equivalence.assert_equivalent(case, step)
"""


def test_a_module_that_pytest_patches_and_rewrites_is_judged_as_patched(tmp_path: Path) -> None:
    """That pytest rewrites the asserts of the module is no change."""
    package = tmp_path / "helpers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(HELPER.replace("    for", "    assert model\n    for"))
    (tmp_path / "conftest.py").write_text(
        "import pytest\npytest.register_assert_rewrite('helpers')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "test_theirs.py").write_text(TESTS + CASE + TESTS_END)
    status, output = someone_elses_run.run(tmp_path, "-q", "--import-mode=importlib")
    assert (status, "4 passed" in output) == (0, True), output


def test_a_file_that_changes_a_module_beside_it_is_judged_with_the_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HELPER)
    start = "import train\nfrom train import reduce_gradients\n"
    (tmp_path / "mine.py").write_text(start + "train.AVERAGE = False\n" + CASE)
    command = [sys.executable, "-m", "ddp_equivalence", "check", "mine.py"]
    variables = with_server_of_these_tests(someone_elses_run.environment())
    done = completed(command, tmp_path, variables, someone_elses_run.LONGEST)
    assert done.returncode == 1, done.stdout + done.stderr
