"""Output that cannot show a character, is full, closed or no longer read: no traceback of ours."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_equivalence.commands.main import main
from tests.combinations import each_once
from tests.package.commands.test_command_line import BESIDE, USER_FILE
from tests.package.one_server import with_server_of_these_tests
from tests.package.someone_elses_run import command, environment

CHATTY = """

def chatty(model, rows, rank):
    import os
    os.write(1, b"caf\\xc3\\xa9 \\xe2\\x80\\x93 \\xc3\\x97 \\xe2\\x80\\xa6")
    doubled(model, rows, rank)
"""

SCRIPT = """
from ddp_equivalence import check
from mine import case, chatty
print(check(case, chatty).full_report())
"""

ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(USER_FILE + CHATTY)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "test_mine.py").write_text(
        "from mine import *\n"
        "def test_here(equivalence):\n    equivalence.assert_equivalent(case, step)\n"
        "def other(*all):\n    step(*all)\n"
        "def test_there(equivalence):\n"
        "    there = Case(model=case.model, batch=case.batch, loss=loss, layout='2x1')\n"
        "    equivalence.assert_equivalent(there, other)\n"
    )
    return tmp_path


def in_shell(folder: Path, line: str, more: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a line of bash, in which ``ddp-equivalence`` is this package's command."""
    ours = 'ddp-equivalence() { "$PY" -m ddp_equivalence "$@"; }; python() { "$PY" "$@"; }; '
    done = subprocess.run(
        ["bash", "-c", ours + line],
        cwd=folder,
        env=with_server_of_these_tests(environment({"PY": sys.executable, **(more or {})})),
        capture_output=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("line", "code", "ascii_only"),
    each_once([("ddp-equivalence check mine.py:chatty --full", 1), ("python script.py", 0)], ASCII),
)
def test_characters_that_the_output_lacks_are_replaced(
    folder: Path, ascii_only: dict[str, str], line: str, code: int
) -> None:
    found, text, errors = in_shell(folder, line, ascii_only)
    assert found == code, errors
    assert errors == ""
    assert "chatty is not big_batch: sum_not_mean" in text
    assert r"| caf\xe9 - x ..." in text


def test_an_error_on_stderr_is_replaced_too(folder: Path) -> None:
    line = "ddp-equivalence check $'caf\\xc3\\xa9.py'"
    code, _, errors = in_shell(folder, line, ASCII[0])
    assert code == 2
    assert r"'caf\xe9.py'; it should be a Python file that exists" in errors
    assert "Traceback" not in errors


@pytest.mark.usefixtures("forget_imports")
def test_output_that_has_the_characters_keeps_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", written)
    assert main(["check", f"{folder / 'mine.py'}:chatty", "--full"]) == 1
    written.seek(0)
    assert "| caf\u00e9 \u2013 \u00d7 \u2026" in written.read()


def test_the_closing_table_is_aligned_in_ascii(folder: Path) -> None:
    done = subprocess.run(
        command("-q", "test_mine.py"),
        cwd=folder,
        env=with_server_of_these_tests(environment(ASCII[1])),
        capture_output=True,
        timeout=240,
        check=False,
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0, text
    assert "\\u2013" not in text
    head, other, step = re.findall(r"^ +1x2 +2x1$|^(?:step|other) .*$", text, re.MULTILINE)
    assert [other.index("-"), other.index("1")] == [head.index("1x2") + 2, head.index("2x1") + 2]
    assert [step.index("1"), step.index("-")] == [head.index("1x2") + 2, head.index("2x1") + 2]


@pytest.mark.usefixtures("forget_imports")
@pytest.mark.parametrize(("name", "code"), [("step", 3), ("doubled", 1)])
def test_a_report_that_nobody_could_read_is_no_success(
    folder: Path,
    name: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        found = main(["check", f"{folder / 'mine.py'}:{name}"])
    assert found == code
    assert capsys.readouterr().err == (
        "ddp-equivalence: the output could not be written: No space left on device\n"
    )


def test_a_reader_who_has_read_enough_changes_nothing(folder: Path) -> None:
    line = (
        "set -o pipefail; ddp-equivalence explore --right 2 --json out.json"
        " | python -c 'print(input())'"
    )
    code, text, errors = in_shell(folder, line)
    assert (code, errors) == (0, "")
    assert text.startswith("2 random cases")
    assert (folder / "out.json").exists()


def test_main_gives_the_streams_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = (sys.stdout, sys.stderr, sys.stdout.errors)
    assert main(["faults", "--list"]) == 0
    assert "sum_not_mean" in capsys.readouterr().out
    assert (sys.stdout, sys.stderr, sys.stdout.errors) == before
