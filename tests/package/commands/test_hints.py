"""What a command tells its user to do next can be done, word for word, where the user stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_equivalence.case.errors import what_is_hidden
from ddp_equivalence.commands.main import main
from tests.package.commands.test_command_line import BESIDE, ROOT, USER_FILE

THEIR_TEST = """
from mine import case, doubled

def test_doubled(equivalence):
    equivalence.assert_equivalent(case, doubled)
"""

QUICK = "--trial-seconds 0"


def ended(folder: Path, command: str) -> tuple[int, str]:
    """Exit code and output of a command as a user types it."""
    word, *rest = shlex.split(command)
    module = {"ddp-equivalence": "ddp_equivalence", "pytest": "pytest"}[word]
    run = subprocess.run(
        [sys.executable, "-P", "-m", module, *rest],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "inner").mkdir()
    for folder in (tmp_path, tmp_path / "inner"):
        (folder / "beside.py").write_text(BESIDE)
        (folder / "mine.py").write_text(USER_FILE)
    (tmp_path / "inner" / "test_mine.py").write_text(THEIR_TEST)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "again"),
    [
        (f"ddp-equivalence check mine.py:doubled {QUICK}", "ddp-equivalence check"),
        ("ddp-equivalence record out --no-suite mine.py:doubled", "ddp-equivalence check"),
        ("pytest -p no:cacheprovider --ddp-trial-seconds 0 test_mine.py", "pytest"),
    ],
)
def test_the_command_after_again_repeats_the_check_from_the_same_folder(
    project: Path, command: str, again: str
) -> None:
    """The folder is not the root folder of pytest."""
    code, text = ended(project / "inner", command)
    assert code == 1, text
    assert "../" not in text
    hint = re.search(r"Again: (.*?)(?:  +More: (\S+))?$", text, re.MULTILINE)
    assert hint is not None, text
    assert hint[1].startswith(again)
    code, repeated = ended(project / "inner", f"{hint[1]} {hint[2] or ''}")
    assert code == 1, repeated
    assert "[sum_not_mean]" in repeated


MORE = [pytest.param(name, marks=pytest.mark.thorough) for name in ("random", "queue", "copy")]


@pytest.mark.parametrize("name", ["types", "torch", *MORE])
def test_a_file_with_the_name_of_a_module_does_not_end_the_ranks(name: str, project: Path) -> None:
    (project / f"{name}.py").write_text("X = 1\n")
    code, text = ended(project, f"ddp-equivalence check mine.py {QUICK}")
    assert (code, text.splitlines()[0]) == (0, "step is big_batch: same"), text


@pytest.mark.parametrize("name", ["types", "queue", "random", "torch", "calendar"])
def test_a_file_that_hides_a_module_is_named(
    name: str, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the folder
    (project / f"{name}.py").write_text("class Batch:\n    pass\n")
    (project / "mine.py").write_text(f"import torch, calendar\nfrom {name} import Batch as B, no\n")
    monkeypatch.chdir(project)
    assert main(["check", "mine.py"]) == 2
    told = f"{name}.py, in {project}, hides a module of Python or torch: rename the file"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cannot import name 'Random' from 'random' (/theirs/random.py)", "random"),
        ("module 'torch' has no attribute 'Tensor'", "torch"),
        ('  File "/theirs/queue.py", line 1', "queue"),
        ("No module named 'numpy.core'; 'numpy' is not a package", "numpy"),
        ("'cuda' is not a package", "cuda"),
        ("unsupported operand types: int and str", None),
        ("a copy of the queue, chosen at random", None),
    ],
)
def test_only_a_module_that_the_error_names_is_suspected(
    text: str, named: str | None, tmp_path: Path
) -> None:
    for name in ("random", "types", "queue", "numpy", "torch", "copy", "cuda"):
        (tmp_path / f"{name}.py").write_text("")
    said = what_is_hidden(tmp_path, text)
    assert said == "" if named is None else said.startswith(f"\n{named}.py, in {tmp_path}, hides")
    assert what_is_hidden(tmp_path / "inner", text) == ""
