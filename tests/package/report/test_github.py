"""Annotations of GitHub Actions: one line for each failing check, escaped as GitHub reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from ddp_equivalence.report.github import annotation

STEPS = """\
import torch
from torch import nn
from ddp_equivalence import Case

case = Case(
    model=lambda: nn.Linear(5, 3),
    batch=lambda g: {"x": torch.randn(8, 5, generator=g), "y": torch.randn(8, 3, generator=g)},
    loss=lambda model, batch: nn.functional.mse_loss(model(batch["x"]), batch["y"]),
)


def step(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    case.loss(ddp, shard).backward()


def twice(model, shard, rank):
    step(model, shard, rank)
    for parameter in model.parameters():
        parameter.grad *= 2


def raises(model, shard, rank):
    raise ValueError("oh, no: 100%")
"""


def test_an_annotation_is_escaped_as_github_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    line = annotation(
        str(tmp_path / "a,b" / "mine.py"), 7, "step: 100%, bad", "50%\nof\r\nit: a, b"
    )
    assert line == (
        "::error file=a%2Cb/mine.py,line=7,title=step%3A 100%25%2C bad::50%25%0Aof%0D%0Ait: a, b"
    )


def test_an_annotation_without_a_file_has_only_a_title() -> None:
    assert annotation("", 0, "oh", "no") == "::error title=oh::no"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_imports: None) -> Path:
    (tmp_path / "mine.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "code", "begins"),
    [
        ("twice", 1, "::error file=mine.py,line="),
        ("raises", 3, "::error file=mine.py,line=24,title=raises against big_batch%3A unknown::"),
    ],
)
def test_check_prints_an_annotation_if_it_is_asked_to(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, begins: str
) -> None:
    assert main(["check", f"mine.py:{name}", "--github"]) == code
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(begins)
    assert main(["check", f"mine.py:{name}"]) == code
    assert "::error" not in capsys.readouterr().out


def test_a_step_that_is_the_same_gets_no_annotation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "mine.py", "--github"]) == 0
    assert "::error" not in capsys.readouterr().out
