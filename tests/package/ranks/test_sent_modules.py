"""What a rank was sent by value can be imported there by its name, as torch.compile does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from ddp_equivalence import check
from ddp_equivalence.commands.user_file import UserCheck, load
from ddp_equivalence.ranks import sent_modules
from tests.combinations import THOROUGH

pytestmark = pytest.mark.self_check

FILE = """
import importlib
import sys

import torch
from torch import nn

from ddp_equivalence import Case

SCALE = 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, rows):
        return rows + SCALE * torch.tanh(self.layer(rows))


def model():
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(4, 2))


def batch(generator):
    return torch.randn(8, 4, generator=generator)


def loss(model, rows):
    return model(rows).square().mean()


def compiled(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    loss(torch.compile(ddp, backend="eager"), shard).backward()


def imports_itself(model, shard, rank):
    here = importlib.import_module(__name__)
    assert here.SCALE is SCALE
    assert here.Block is Block
    assert not hasattr(here, "NOTHING")
    assert getattr(sys.modules["__main__"], "__file__", None) is None
    ddp = nn.parallel.DistributedDataParallel(model)
    loss(ddp, shard).backward()


def imports_what_is_not_there(model, shard, rank):
    try:
        importlib.import_module("no_such_module_anywhere")
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError
    imports_itself(model, shard, rank)


case = Case(model=model, batch=batch, loss=loss, layout="1x2")
"""


def sent(path: Path, name: str) -> UserCheck:
    file = path / "mine_that_is_sent.py"
    file.write_text(FILE)
    return load(file, name)


@pytest.mark.parametrize(
    "name",
    ["imports_itself", "imports_what_is_not_there", pytest.param("compiled", marks=THOROUGH)],
)
def test_a_step_imports_its_own_module_on_the_ranks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    mine = sent(tmp_path, name)
    for _ in range(2):  # ranks that have done it once do it again, with other functions
        verdict = check(mine.case, mine.step)
        assert verdict.outcome == "same", str(verdict)


def test_nothing_is_left_of_what_was_importable() -> None:
    names: dict[str, Any] = {"__name__": "sent_from_somewhere", "VALUE": 3}
    function = FunctionType((lambda: None).__code__, names)
    before = sys.modules["__main__"], [*sys.meta_path]
    of_main = FunctionType((lambda: None).__code__, {"__name__": "__main__", "__file__": "mine.py"})
    with sent_modules.importable():
        import sent_from_somewhere  # type: ignore[import-not-found]

        assert sent_from_somewhere.VALUE == 3
        assert function.__globals__ is names
        assert getattr(sys.modules["__main__"], "__file__", None) is None, of_main
    assert "sent_from_somewhere" not in sys.modules
    assert (sys.modules["__main__"], [*sys.meta_path]) == before
