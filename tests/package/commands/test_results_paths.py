"""A path for results is refused before anything runs, and no table is lost if the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from tests.package.commands.test_command_line import BESIDE, USER_FILE
from tests.package.commands.test_command_line import run as run_command
from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run as run_pytest


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_imports: None) -> str:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(USER_FILE)
    (tmp_path / "a_file").touch()
    monkeypatch.chdir(tmp_path)
    return "mine.py:doubled"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "run --json .",
            "--json . should be a file in a folder that exists and can be written to; it is",
        ),
        ("run --json no/such/x.json", "there is no folder"),
        ("run --json a_file/x.json", "there is no folder"),
        ("run --json /proc/x.json", "--json /proc/x.json should be a file in a folder that exists"),
        ("explore --json /proc/x.json", "--json /proc/x.json should be a file"),
        ("explain --batch 4 --json a_file/x.json", "--json a_file/x.json should"),
        ("sandbox --table --json /proc/x.json", "--json /proc/x.json should be a file"),
        (
            "check mine.py:doubled --export-repro a_file",
            "--export-repro a_file should be a folder that",
        ),
        ("check mine.py:doubled --export-repro a_file/in", "a_file is no folder"),
        ("check mine.py:doubled --export-repro /proc/x", "--export-repro /proc/x should"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(
    mine: str, capsys: pytest.CaptureFixture[str], command: str, says: str
) -> None:
    code = main(command.split())
    text, errors = capsys.readouterr()
    assert (code, text) == (2, "")
    assert says in errors


def test_asking_whether_a_file_can_be_written_leaves_none_and_changes_none(
    mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json"):
        assert main(["explain", "--batch", "0", "--json", name]) == 2
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("--ddp-json=.", "--ddp-json .: expected a file in a folder that exists and can be"),
        ("--ddp-json=/proc/x.json", "--ddp-json /proc/x.json: expected a file"),
        (
            "--ddp-export-repro=test_theirs.py",
            "--ddp-export-repro test_theirs.py: expected a folder",
        ),
    ],
)
def test_pytest_refuses_it_too(tmp_path: Path, argument: str, says: str) -> None:
    (tmp_path / "test_theirs.py").write_text("def test_theirs():\n    pass\n")
    code, text = run_pytest(tmp_path, argument)
    assert code == 4
    assert says in text
    assert "INTERNALERROR" not in text


def test_a_full_disk_at_the_end_costs_neither_the_table_nor_the_failures(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(THEIR_TEST)
    code, text = run_pytest(tmp_path, "--ddp-json=/dev/full", "-k", "fixture")
    assert code == 1
    assert "INTERNALERROR" not in text
    assert "Traceback" not in text
    assert "1 passed" in text
    assert "1 case compared with one big batch" in text
    line = "--ddp-json /dev/full: FAILED, the results could not be written: No space left on device"
    assert line in text


def test_the_results_of_a_run_are_in_the_folder_where_it_was_started(tmp_path: Path) -> None:
    elsewhere = "\ndef test_elsewhere():\n    import os\n    os.chdir('/')\n"
    (tmp_path / "test_theirs.py").write_text(elsewhere)
    code, text = run_pytest(tmp_path, "--ddp-json=results.json")
    assert code == 0, text
    assert (tmp_path / "results.json").exists()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("explain --batch 4 --json /dev/full", "batch"),
        ("explore --right 8 --json /dev/full", "judged rightly"),
        ("run tests/equivalence/test_ddp_gathered.py -k 1x2 --json /dev/full", "compared"),
    ],
)
def test_a_command_prints_its_results_before_it_says_that_the_disk_is_full(
    command: str, shown: str
) -> None:
    code, text, errors = run_command(*command.split())
    assert code not in (0, None)
    assert "No space left on device" in text + errors
    assert "Traceback" not in text + errors
    assert shown in text
