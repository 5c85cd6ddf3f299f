"""A full disk: one line says which file could not be written, and nothing is half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_equivalence.gate.record import NAME, RecordWriter, read_lines
from ddp_equivalence.report.text import NotWritten, write_file
from tests.package.commands.test_command_line import BESIDE, ROOT, USER_FILE
from tests.package.gate.records import write

FULL = (
    'mount -t tmpfs -o size=64k none full && { echo old > full/old; yes > full/fill; }; exec "$@"'
)
"""Shell commands: a small disk with an old file, which is filled up."""

NO_SPACE = "could not be written: No space left on device"


def on_a_full_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run it where ``full`` is a full disk. What is left there is listed at the end of stdout."""
    isolated = ["unshare", "--mount", "sh", "-c", f"{{ {FULL}; }}", "sh"]
    (folder / "full").mkdir(exist_ok=True)
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the permission to mount")
    listing = '"$@"; code=$?; find full -mindepth 1 | sort | tr "\\n" " "; cat full/old; exit $code'
    return subprocess.run(
        [*isolated, "sh", "-c", listing, "sh", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(USER_FILE)
    (tmp_path / "test_mine.py").write_text("def test_nothing():\n    pass\n")
    write(tmp_path / "good")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("report good --html full/page.html", "full/page.html"),
        ("report good --html full/old", "full/old"),
        ("gate good good --json full/gate.json", "full/gate.json"),
        ("gate good good --junit full/gate.xml", "full/gate.xml"),
        ("gate good good --markdown full/gate.md", "full/gate.md"),
        ("gate good good --markdown full/old", "full/old"),
        ("receipt good --out full/receipt.json", "full/receipt.json"),
        ("record full/record --no-suite mine.py", "full/record/record.jsonl"),
        ("observe --keep full/kept -- torchrun --nproc-per-node 2 mine.py", "record.instructions"),
        ("check mine.py:doubled --trial-seconds 0 --export-repro full/repro", "full/repro/"),
    ],
)
def test_a_line_names_the_file_and_nothing_is_half_written(
    folder: Path, command: str, named: str
) -> None:
    ended = on_a_full_disk(folder, sys.executable, "-m", "ddp_equivalence", *command.split())
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"ddp-equivalence {command.split()[0]}: ")
    assert named in last
    assert last.endswith(NO_SPACE)
    assert "Traceback" not in ended.stderr + ended.stdout
    assert ended.returncode == 2
    left = ended.stdout.splitlines()[-1].split()
    assert left[:2] == ["full/fill", "full/old"], left
    assert left[-1] == "old"
    assert all(Path(one).name == "repro" for one in left[2:-1]), left


def test_pytest_says_it_as_well(folder: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--ddp-json=full/a.json"]
    ended = on_a_full_disk(folder, sys.executable, *words, "test_mine.py")
    assert "--ddp-json full/a.json: FAILED, the results could not be written: No space" in (
        ended.stdout
    )
    assert ended.stdout.splitlines()[-1] == "full/fill full/old old"


WRITES = """
import sys
from pathlib import Path
from ddp_equivalence.gate.record import RecordWriter
from ddp_equivalence.report.text import NotWritten
Path("full/fill").unlink()
writer = RecordWriter(Path("full/record.jsonl"))
try:
    for number in range(1000):
        writer.write("test", id="x" * 500)
except NotWritten as error:
    print(error.filename)
print(Path("full/record.jsonl").read_bytes().endswith(b"\\n"))
"""


def test_a_record_keeps_its_whole_lines_when_the_disk_is_full(folder: Path) -> None:
    ended = on_a_full_disk(folder, sys.executable, "-c", WRITES)
    assert ended.stdout.splitlines()[:2] == ["full/record.jsonl", "True"], ended.stderr


def test_a_file_is_written_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    path.chmod(0o600)
    (tmp_path / "link").symlink_to(path)
    write_file(tmp_path / "link", "new\u00e9")
    assert path.read_text(encoding="utf-8") == "new\u00e9"
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "link").is_symlink()
    assert {one.name for one in tmp_path.iterdir()} == {"results.json", "link"}
    write_file(Path("/dev/null"), b"nothing")
    piped = "from ddp_equivalence.report.text import *; write_file(Path('/dev/stdout'), 'a\\n')"
    run = subprocess.run([sys.executable, "-c", piped], stdout=subprocess.PIPE, check=True)
    assert run.stdout == b"a\n"
    with pytest.raises(NotWritten, match="No such file"):
        write_file(tmp_path / "none" / "file", "")


def test_lines_of_a_record_are_appended(tmp_path: Path) -> None:
    for number in range(3):
        RecordWriter(tmp_path / NAME).write("test", id=str(number))
    assert [one["id"] for one in read_lines(tmp_path / NAME)] == ["0", "1", "2"]
    assert json.loads((tmp_path / NAME).read_text().splitlines()[0])["kind"] == "test"
