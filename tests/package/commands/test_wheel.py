"""The wheel carries the suite: it runs in an empty folder, without a checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout, as pip would lay it into site-packages."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(CHECKOUT)]
    subprocess.run(command, check=True, timeout=120)
    (wheel,) = folder.glob("ddp_equivalence-*.whl")
    site = folder / "site"
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_suite_runs_from_the_wheel_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    files = ("equivalence/test_ddp.py", "equivalence/test_right_code.py", PLANTED)
    select = "test_ddp_mean and mlp and 1x2 and float64 or planted and sum_not_mean or tiny_buckets"
    words = ["run", *(f"tests/{one}" for one in files), "-k", select, "--json", "out.json"]
    done = subprocess.run(
        [sys.executable, "-m", "ddp_equivalence", *words],
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"^planted faults +(\d+) of \1 caught, \1 of \1 named", done.stdout, re.MULTILINE
    )
    assert "compared with one big batch" in done.stdout
    assert str(CHECKOUT) not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


PLANTED = "diagnosis/test_planted_faults.py"


def test_the_wheel_has_all_files_of_the_suite(unpacked: Path) -> None:
    tests, suite = CHECKOUT / "tests", unpacked / "ddp_equivalence" / "suite" / "tests"
    folders = (tests / "equivalence", tests / "difference")
    files = [one for folder in folders for one in folder.glob("**/*.py")]
    assert len(files) > 10
    for file in (*files, tests / "__init__.py", tests / PLANTED):
        assert (suite / file.relative_to(tests)).read_bytes() == file.read_bytes()


def test_the_wheel_is_typed_and_has_its_licence_and_plugin(unpacked: Path) -> None:
    assert (unpacked / "ddp_equivalence" / "py.typed").is_file()
    assert (unpacked / "ddp_equivalence" / "gate" / "template" / "page.html").is_file()
    assert list(unpacked.glob("*.dist-info/licenses/LICENSE"))
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    text = entry_points.read_text()
    assert "ddp-equivalence = ddp_equivalence.commands.main:main" in text
    assert "ddp_equivalence.pytest_plugin = ddp_equivalence.pytest_plugin" in text
