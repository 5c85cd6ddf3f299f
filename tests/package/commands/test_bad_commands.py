"""Command lines of a tired user: each is told what is right, before anything runs or is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from tests.package.commands.test_command_line import BESIDE, USER_FILE

MIXED_OPTIONS = USER_FILE + "\noptions = {'speed': 3, 1: 2}\n"


@pytest.fixture(autouse=True)
def _their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_imports: None) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(USER_FILE)
    (tmp_path / "mixed.py").write_text(MIXED_OPTIONS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("check mine.py --explore 0", "--explore 0 should be a number of cases from 1"),
        ("check mine.py --explore 2 --in-process", "left out with --in-process"),
        ("check mine.py --explore 2 --export-repro out", "left out with --explore"),
        ("check mixed.py", "1 is none of them"),
        ("check mine.py::nothing", "NAME = 'nothing': the name of a step in mine.py"),
        ("check mine.py --layout 100x100", "at most 64 ranks"),
        ("check mine.py --layout 9999+1", "at most 64 ranks"),
        ("faults sum_not_mean --layout 1x2 --right -1", "--right -1 should be an integer from 0"),
        ("faults --list nosuch", "'nosuch': one of accumulation_boundary"),
        ("faults --sensitivity sum_not_mean", "sum_not_mean should be left out with --sensitivity"),
        ("faults --sensitivity --layout 1x2", "--layout 1x2 should be left out with --sensitivity"),
        ("explain --batch 99999999999999999999", "a whole number from 1 to 1"),
        ("run --must-run nvlink", "--must-run nvlink should be one of gpu, nccl"),
    ],
)
def test_it_is_told_on_stderr_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    code = main(command.split())
    text, errors = capsys.readouterr()
    assert (code, text) == (2, "")
    assert says in errors
    assert "Traceback" not in errors


def test_the_listing_of_some_faults_has_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "sum_not_mean"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("sum_not_mean\n")
    assert "averaged_twice" not in text


def test_faults_that_cannot_show_on_the_layout_show_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["faults", "sum_not_mean", "--layout", "1x1"]) == 3
    assert "nothing was shown: no fault can show" in capsys.readouterr().out


def test_a_step_may_be_named_as_pytest_names_tests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "mine.py::doubled"]) == 1
    assert "different: doubled (mine.py:" in capsys.readouterr().out
