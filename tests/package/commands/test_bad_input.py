"""Bad input of a tired user: each is told what is right, before anything runs or is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from tests.package.commands.test_command_line import BESIDE, USER_FILE
from tests.package.commands.test_command_line import run as run_command
from tests.package.gate.records import write
from tests.package.pytest_plugin.test_pytest_plugin import THEIR_TEST
from tests.package.someone_elses_run import run as run_pytest

FILES = {
    "beside.py": BESIDE,
    "mine.py": USER_FILE,
    "mixed.py": USER_FILE + "\noptions = {'speed': 3, 1: 2}\n",
    "speed.py": USER_FILE + "\noptions = {'speed': 3}",
    "layout.py": USER_FILE.replace("1x2", "2xx2"),
    "no_case.py": "x = 1",
    "other_case.py": "case = 3",
    "divides.py": "1 / 0",
    "imports.py": "import no_such_module",
    "a_file": "",
    "old.json": "old",
}
FILE_RIGHT = "should be a file in a folder that exists and can be written to; it is"


@pytest.fixture
def _their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_imports: None) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "taken").mkdir()
    write(tmp_path / "good")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_their_folder")
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("check nowhere.py", "FILE is nowhere.py; it should be a Python file that exists"),
        ("check no_case.py", "case is missing; it should be a Case in no_case.py"),
        ("check other_case.py", "case is of type int; it should be a Case in other_case.py"),
        ("check divides.py", "ZeroDivisionError: division by zero"),
        ("check imports.py", "No module named 'no_such_module'"),
        ("check layout.py", "layout is '2xx2'; it should be nodes x ranks per node"),
        ("check speed.py", "it should be without 'speed': the options"),
        ("check mixed.py", "it should be without 1: the options of check() are"),
        (
            "check mine.py:",
            "NAME is ''; it should be a step in mine.py, one of step, doubled, raises",
        ),
        ("check mine.py::nothing", "NAME is 'nothing'; it should be a step in mine.py"),
        ("check mine.py --layout 10x10", "at most 64 ranks"),
        ("check mine.py --layout 99x99", "at most 4096 ranks"),
        (
            "check mine.py --examples 13",
            "--examples is 13; it should be at most the 12 examples of the",
        ),
        (
            "check mine.py --examples 0,12",
            "--examples is 0,12; it should be at most the 12 examples",
        ),
        ("check mine.py --examples 0", "--examples is 0; it should be a number of examples from 1"),
        (
            "check mine.py --examples 1,1",
            "--examples is 1,1; it should be a number of examples from 1",
        ),
        (
            "check mine.py --examples some",
            "--examples is some; it should be a number of examples from 1",
        ),
        (
            "check mine.py --trial-seconds -1",
            "--trial-seconds is -1.0; it should be a number of seconds",
        ),
        ("check mine.py --explore 0", "--explore is 0; it should be a number of cases from 1"),
        ("check mine.py --explore 2 --in-process", "left out with --in-process"),
        ("check mine.py --explore 2 --export-repro out", "left out with --explore"),
        (
            "check mine.py --explore 3 --examples 13",
            "--examples is 13; it should be at most the 12",
        ),
        (
            "check mine.py --explore 3 --shards 1+1+1+1+1",
            "--shards is 1+1+1+1+1; it should be one size",
        ),
        (
            "check mine.py --export-repro a_file",
            "--export-repro is a_file; it should be a folder that",
        ),
        ("check mine.py --export-repro a_file/in", "a_file is no folder"),
        ("check mine.py --export-repro /proc/x", "--export-repro is /proc/x; it should"),
        ("explore --right 0", "--right is 0; it should be"),
        ("explore --wrong -1", "--wrong is -1; it should be an integer from 0"),
        ("explore --json /proc/x.json", "--json is /proc/x.json; it should be a file"),
        ("faults --list nosuch", "'nosuch'; it should be one of accumulation_boundary"),
        (
            "faults --sensitivity sum_not_mean",
            "names is sum_not_mean; it should be left out with --sensitivity",
        ),
        (
            "faults --sensitivity --layout 1x2",
            "--layout is 1x2; it should be left out with --sensitivity",
        ),
        ("run --json .", f"--json is .; it {FILE_RIGHT}"),
        ("run --json no/such/x.json", "there is no folder"),
        ("run --json a_file/x.json", "there is no folder"),
        (
            "run --json /proc/x.json",
            "--json is /proc/x.json; it should be a file in a folder that exists",
        ),
        ("run --record a_file", "--record is a_file; it should be a folder that can be written to"),
        (
            "run --record /proc/no",
            "--record is /proc/no; it should be a folder that can be written to",
        ),
        ("record taken", "OUT is taken; it should be a folder that does not exist yet"),
        (
            "record out --no-suite",
            "PATH is missing; it should be checks of your own beside --no-suite",
        ),
        ("record out none.py", "PATH is none.py; it should be a file or folder that exists"),
        ("record out old.json", "PATH is old.json; it should be a folder, or a file of Python"),
        ("record out mine.py mine.py", "PATH is mine.py; it should be given once"),
        ("record out mine.py::step", "PATH is mine.py::step; it should be mine.py:STEP"),
        ("record out mine.py -n many", "-n is many; it should be a number of workers"),
        ("gate good", "RECORD is good; it should be two records, or have --against-now"),
        ("gate taken none", "record is 'taken'; it should be a folder with record.jsonl"),
        ("gate good good --policy none.toml", "--policy is none.toml; it should be a file"),
    ],
)
def test_it_is_told_on_stderr_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, says: str
) -> None:
    code = main(command.split())
    text, errors = capsys.readouterr()
    assert (code, text) == (2, "")
    assert "bad input" in errors
    assert says in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "right"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("chek", "COMMAND is chek; it should be one of run, check,"),
        ("check", "the following arguments are required: FILE.py[:NAME]"),
        (
            "check x.py --stesp 3",
            "--stesp is no argument of ddp-equivalence check; did you mean --steps?",
        ),
        ("check x.py --steps many", "--steps is many; it should be a whole number."),
        ("check x.py --dtype x", "--dtype is x; it should be one of float64,"),
        (
            "check x.py --layout",
            "--layout is without a value; it should be followed by one argument",
        ),
        ("explain --batch 4 x", "x is no argument of ddp-equivalence explain."),
        ("run --must-run nvlink", "--must-run is nvlink; it should be one of gpu, nccl,"),
        ("explain", "the following arguments are required: --batch"),
        ("explain --batch 4 --accumulation-divided --accumulation-not-divided", "not allowed with"),
        (
            "record out --no-siute",
            "--no-siute is no argument of ddp-equivalence record; did you mean --no-suite?",
        ),
    ],
)
def test_what_is_no_argument_is_told_in_a_few_lines(
    capsys: pytest.CaptureFixture[str], command: str, right: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    text, errors = capsys.readouterr()
    assert text == ""
    assert right in " ".join(errors.split())
    assert re.search(r"See ddp-equivalence( \w+)? --help\.$", " ".join(errors.split()))
    assert len(errors.splitlines()) < 8


@pytest.mark.usefixtures("_their_folder")
def test_asking_whether_a_file_can_be_written_leaves_none_and_changes_none(tmp_path: Path) -> None:
    for name in ("old.json", "new.json"):
        assert main(["explore", "--right", "-1", "--json", name]) == 2
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new.json").exists()


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
        ("explore --right 2 --json /dev/full", "2 random right cases: 0 false alarms"),
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
