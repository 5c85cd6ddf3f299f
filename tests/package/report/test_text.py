"""Reports on a terminal are coloured, and GitHub gets one annotation for each failing check."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from ddp_equivalence.report.text import (
    GREEN,
    RED,
    Line,
    Style,
    annotation,
    labelled,
    painted,
    width_of,
)
from tests.package.report.report_cases import USER_FILE

REPORT = [
    Line("step is not big_batch: sum_not_mean", Style.BAD),
    Line(""),
    *labelled("Look at: ", "the divisor"),
]
PLAIN_TEXT = "step is not big_batch: sum_not_mean\n\n  Look at: the divisor\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_difference_is_red_on_a_terminal_and_its_words_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    text = painted(REPORT, Terminal())
    assert text.startswith(f"{RED}step is not big_batch: sum_not_mean")
    same = [Line("step is big_batch: same", Style.GOOD)]
    assert painted(same, Terminal()).startswith(GREEN)
    assert "\033[1m  Look at:\033[0m the divisor" in text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_user_who_wants_no_colours_gets_none(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert painted(REPORT, Terminal()) == PLAIN_TEXT


def test_a_file_gets_no_colours_and_the_width_that_is_given() -> None:
    assert painted(REPORT, io.StringIO()) == PLAIN_TEXT
    assert width_of(io.StringIO(), 96) == 96


@pytest.mark.parametrize(("columns", "expected"), [(40, 72), (100, 100), (400, 140)])
def test_the_width_is_that_of_the_terminal_within_reason(
    columns: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert width_of(Terminal(), 96) == expected


# Annotations, escaped as GitHub reads them.

STEPS = f"""\
{USER_FILE}
def step(model, shard, rank):
    ddp = nn.parallel.DistributedDataParallel(model)
    loss(ddp, shard).backward()


def twice(model, shard, rank):
    step(model, shard, rank)
    for parameter in model.parameters():
        parameter.grad *= 2


def raises(model, shard, rank):
    raise ValueError("oh, no: 100%")
"""
RAISES = len(STEPS.splitlines())


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
        (
            *("raises", 3),
            f"::error file=mine.py,line={RAISES},title=raises against big_batch%3A unknown::",
        ),
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
    assert main(["check", "mine.py:step", "--github"]) == 0
    assert "::error" not in capsys.readouterr().out
