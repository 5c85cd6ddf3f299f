"""Suites that keep their cases and steps in registries, as their authors would write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package import someone_elses_run

COMMON = '''
import dataclasses, functools, importlib, pkgutil
import torch
import torch.distributed as dist
from torch import nn
from ddp_equivalence import Case

REGISTER = {}
ORDER = []


@dataclasses.dataclass
class Row:
    name: str
    step: object
    loss: object
    right: bool
    options: dict = dataclasses.field(default_factory=dict)

    def case(self):
        return Case(model=build, batch=batch, loss=functools.partial(self.loss, **self.options),
                    layout="1x2")


def row(name, loss, right=True, **options):
    """Enter the decorated step in the table."""
    def keep(function):
        assert name not in REGISTER, name
        REGISTER[name] = Row(name, function, loss, right, options)
        ORDER.append(REGISTER[name])
        return function
    return keep


def discover(package):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def build():
    return nn.Linear(5, 3)


def batch(generator):
    return torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)


def powered(model, batch, power=2):
    inputs, targets = batch
    return (model(inputs) - targets).abs().pow(power).mean()


def average(model, divide=True):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if divide:
            parameter.grad /= dist.get_world_size()


def run_row(name, model, shard, rank):
    """A step which goes through the table itself."""
    found = REGISTER[name]
    assert found in ORDER
    found.step(found, model, shard)
'''

ROWS = """
import common
from common import average, powered, row


@row("t0{n}_loss", powered, power={n} + 1)
def right(self, model, shard):
    self.loss(model, shard, **self.options).backward()
    average(model)


@row("t0{n}_sum", powered, right=False)
def wrong(self, model, shard):
    self.loss(model, shard, **self.options).backward()
    average(model, divide=False)


for power in (2, 3):
    @row(f"t0{n}_lambda{{power}}", lambda model, batch, power=power: powered(model, batch, power))
    def of_loop(self, model, shard):
        self.loss(model, shard).backward()
        average(model)
"""

TEST_ROWS = """
import functools
import pytest
import common, rows
from ddp_equivalence import check

common.discover(rows)


@pytest.mark.parametrize("name", common.REGISTER)
def test_row(name):
    row = common.REGISTER[name]

    def step(model, shard, rank):
        assert row is common.REGISTER[name]
        row.step(row, model, shard)

    assert check(row.case(), step).outcome == ("same" if row.right else "different")


@pytest.mark.parametrize("row", common.ORDER, ids=lambda row: row.name)
def test_by_name(row):
    verdict = check(row.case(), functools.partial(common.run_row, row.name))
    assert verdict.outcome == ("same" if row.right else "different")


@pytest.mark.parametrize("name", [name for name in common.REGISTER if name.endswith("_loss")])
def test_options_only(name):
    options = common.REGISTER[name].options

    def loss(model, batch):
        return common.powered(model, batch, options["power"])

    def step(model, shard, rank):
        loss(model, shard).backward()
        common.average(model)

    case = common.Case(model=common.build, batch=common.batch, loss=loss, layout="1x2")
    assert check(case, step).outcome == "same"
"""


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_suites_with_registries_run_on_two_workers(tmp_path: Path, mode: str) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "__init__.py").write_text("")
    for n in (1, 2):
        (rows / f"rows{n}.py").write_text(ROWS.format(n=n))
    for name, text in {
        "common": COMMON,
        "test_rows": TEST_ROWS,
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    status, output = someone_elses_run.run(tmp_path, "-n", "2", f"--import-mode={mode}")
    assert (status, "FAILED" in output) == (0, False), output
    assert "18 passed" in output, output
    assert "differ, as their tests expect  4 (sum_not_mean)" in output, output
