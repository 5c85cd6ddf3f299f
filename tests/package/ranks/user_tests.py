"""A user's test files. The tests of this package run them and disturb the run."""

from __future__ import annotations

from tests.package.ranks.marked_run import MarkedRun

CONFTEST = """
import os
from ddp_equivalence.ranks.server import start_early

def report(event):
    with open(os.environ["EVENTS"], "a") as file:
        file.write(event + "\\n")

def pytest_configure(config):
    if not config.getoption("numprocesses"):
        start_early()
        report("the fork server starts")
"""
"""It starts the server before the tests import torch, so that both happen at the same time."""

BEGIN = """
import os, signal, socket, subprocess, tempfile, time
from multiprocessing import forkserver
import pytest, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from conftest import report
from ddp_equivalence import Case, RankFailed, assert_equivalent

def build():
    return nn.Linear(3, 2)

def batch(generator):
    return torch.randn(24, 3, generator=generator)

def loss(model, rows):
    return model(rows).square().mean()

def step(model, rows, rank):
    report("ranks work")
    print("a long line " * 20_000)
    ddp = DistributedDataParallel(model)
    loss(ddp, rows).backward()

def case(layout):
    return Case(model=build, batch=batch, loss=loss, layout=layout)
"""

TRAINS = """
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains(layout):
    report(f"{layout} begins")
    assert_equivalent(case(layout), step)
    report(f"{layout} ends")
"""

HANGS = """
def hangs(model, rows, rank):
    if CHILDREN:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    report(f"rank {rank.rank} hangs")
    time.sleep(1000)

def test_hangs():
    assert_equivalent(case("1x2"), hangs)
"""


def write_tests(run: MarkedRun, *layouts: str, tests: str = TRAINS) -> None:
    """Write the test file, which checks these layouts, and its conftest.py."""
    (run.folder / "conftest.py").write_text(CONFTEST)
    path = run.folder / "test_training.py"
    path.write_text(f"{BEGIN}\nLAYOUTS = {layouts!r}\n{tests}")
