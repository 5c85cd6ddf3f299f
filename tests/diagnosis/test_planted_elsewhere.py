"""Faults can be planted in other people's parity tests too, to see which of them notice."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import BadCase, check
from ddp_equivalence.faults.plant import planted
from tests.package.own_cases import own_case, right_step
from tests.package.someone_elses_run import run


def parity(rank: int, port: int) -> None:
    """A careful project's own test: DDP on two ranks against the whole batch on one."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, rows = nn.Linear(4, 3), torch.randn(8, 4)
    ddp = DistributedDataParallel(model)
    ddp(rows[4 * rank : 4 * rank + 4]).square().mean().backward()
    assert model.weight.grad is not None
    found = model.weight.grad.clone()
    del ddp  # before its group
    dist.destroy_process_group()
    model.zero_grad()
    model(rows).square().mean().backward()
    torch.testing.assert_close(found, model.weight.grad)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_fault_reaches_processes_that_are_spawned_and_tells_that_it_fired() -> None:
    with planted("sum_not_mean") as found, pytest.raises(ProcessRaisedException, match="close"):
        spawn(parity, (free_port(),), nprocs=2)
    assert found.fired > 0


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(BadCase, match="sum_not_mean"), planted("sum_not_meen"):
        pass


THEIRS = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ddp_equivalence import Case, assert_equivalent

CASE = Case(
    model=lambda: nn.Linear(3, 2),
    batch=lambda generator: torch.randn(8, 3, generator=generator),
    loss=lambda model, rows: model(rows).square().mean(),
    layout="1x2",
)

def step(model, rows, rank):
    ddp = DistributedDataParallel(model)
    ddp(rows).square().mean().backward()

def trains(model, rows, rank):
    ddp = DistributedDataParallel(model)
    ddp(rows).square().mean().backward()
    assert model.weight.grad.abs().sum() > 0

def test_that_notices():
    assert_equivalent(CASE, step)

def test_that_does_not():
    from ddp_equivalence import check
    assert check(CASE, trains).outcome != "same"

def test_that_never_comes_by():
    assert 1 + 1 == 2
"""


def test_plant_lists_the_tests_that_do_not_notice(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIRS)
    code, text = run(tmp_path, "--plant", "sum_not_mean")
    assert code == 1
    assert "[sum_not_mean]" in text
    assert "planted: sum_not_mean" in text
    assert "noticed by 1 tests" in text
    assert "NOT NOTICED by 1 tests" in text
    assert "    test_theirs.py::test_that_does_not" in text
    assert "never fired in 1 tests" in text


def test_a_fault_that_is_not_known_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_nothing(): pass")
    code, text = run(tmp_path, "--plant", "nothing_known")
    assert code == 4
    assert "--plant is nothing_known" in text


@pytest.mark.self_check
def test_what_a_report_asks_for_while_a_fault_is_planted_is_computed_with_intact_torch() -> None:
    """A report may be printed inside the block, and computes gradients of examples only then."""
    examples = (0, 1)
    with planted("gradient_scaled_not_unscaled"):
        inside, outside = (check(own_case(), right_step).view for _ in range(2))
        assert inside is not None
        gradient = inside.examples.gradient(examples)
    assert outside is not None
    torch.testing.assert_close(gradient, outside.examples.gradient(examples))
