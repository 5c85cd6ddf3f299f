"""``matrix`` records under several versions, and finds the release that changed a verdict."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import pytest

from ddp_equivalence.commands.exit_codes import BAD_INPUT, DIFFERENT, NOT_JUDGED
from ddp_equivalence.commands.main import main
from ddp_equivalence.commands.matrix import (
    Wanted,
    between,
    this_package,
    wanted,
)

RELEASES = {"1.0": True, "1.1": True, "1.2": False, "1.10": False}
"""The versions of a small package, and whether it is right."""

TEST = """
import small_package

def test_it_is_right():
    assert small_package.RIGHT
"""


def wheel(folder: Path, version: str, right: bool) -> None:
    """A wheel of the package, as the packaging standard has it."""
    at = f"small_package-{version}.dist-info"
    with zipfile.ZipFile(folder / f"small_package-{version}-py3-none-any.whl", "w") as file:
        file.writestr("small_package/__init__.py", f"RIGHT = {right}\n")
        metadata = f"Metadata-Version: 2.1\nName: small_package\nVersion: {version}\n"
        file.writestr(f"{at}/METADATA", metadata)
        file.writestr(
            f"{at}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        names = ("small_package/__init__.py", f"{at}/METADATA", f"{at}/WHEEL", f"{at}/RECORD")
        file.writestr(f"{at}/RECORD", "".join(f"{name},,\n" for name in names))


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a test, beside releases that pip finds, and pip finds nothing else."""
    (tmp_path / "wheels").mkdir()
    for version, right in RELEASES.items():
        wheel(tmp_path / "wheels", version, right)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small_package.py").write_text(TEST)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


@pytest.mark.thorough
def test_the_release_that_changed_a_verdict_is_found(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["matrix", "--on-top", "tests", "--bisect", "small-package==1.0..1.10"]
    assert main(words) == DIFFERENT
    printed = capsys.readouterr().out
    assert "small-package==1.2 is the first release with other verdicts." in printed
    assert "small-package==1.1 is the last one before it that has those of" in printed
    assert "RED  test_failed: 1" in printed
    assert "passed -> failed: assert False" in printed

    with_a_gap = "small-package==1.1,small-package==1.7,small-package==1.2"
    assert main(["matrix", "--on-top", "tests", "--with", with_a_gap]) == DIFFERENT
    printed = capsys.readouterr().out
    assert "small-package==1.1 (1 of 3): recorded before" in printed
    assert "red: small-package==1.1 -> small-package==1.2" in printed
    assert "small-package==1.7: NOT RECORDED\n" in printed
    assert "(from versions: 1.0, 1.1, 1.2, 1.10)" in printed

    (index / "tests" / "test_small_package.py").write_text(f"{TEST}# another one\n")
    both = "small-package==1.0,Small_Package==1.1"
    assert main(["matrix", "--on-top", "tests", "--with", both]) == DIFFERENT  # nothing compared
    printed = capsys.readouterr().out
    assert "recorded before" not in printed
    assert "red: small-package==1.0 -> Small_Package==1.1" in printed
    assert not list((index / "temporary").glob("ddp_equivalence-matrix-*"))  # all are deleted


def test_what_is_not_compared_with_anything_is_no_success(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = "small-package==1.7,small-package==1.8"
    assert main(["matrix", "--on-top", "tests", "--with", both]) == NOT_JUDGED
    assert "Nothing was held against anything." in capsys.readouterr().out


def test_a_folder_of_the_user_is_not_deleted(index: Path) -> None:
    (index / "matrix" / "present").mkdir(parents=True)
    (index / "matrix" / "present" / "thesis.txt").write_text("mine")
    words = ["matrix", "tests", "--on-top", "--with", "present,small-package==1.0"]
    assert main(words) == BAD_INPUT
    assert (index / "matrix" / "present" / "thesis.txt").read_text() == "mine"


def test_another_version_than_the_one_that_was_asked_for_is_not_recorded(
    index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(index / "wheels" / "small_package-1.1-py3-none-any.whl") as file:
        file.extractall(index / "first")
    monkeypatch.setenv("PYTHONPATH", str(index / "first"))
    words = ["matrix", "tests", "--on-top", "--with", "small-package==1.0,small-package==1.7"]
    assert main(words) == NOT_JUDGED
    printed = capsys.readouterr().out
    assert "small-package 1.0 was asked for, and 1.1 ran" in printed


@pytest.mark.thorough
def test_a_folder_that_hides_the_package_that_was_asked_for_is_found(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is imported first, and has no version."""
    (index / "small_package").mkdir()
    (index / "small_package" / "__init__.py").write_text("RIGHT = True\n")
    code = main(["matrix", "tests", "--on-top", "--with", "present,small-package==1.0"])
    printed = capsys.readouterr().out
    assert code == NOT_JUDGED
    assert "small-package of this folder is imported, and not the package" in printed


def test_what_is_wanted() -> None:
    found = wanted(["present", "torch==2.12.1,torch==2.13.0&numpy==2.4.0"])
    assert [one.name for one in found] == ["present", "torch==2.12.1", "torch==2.13.0+numpy==2.4.0"]
    present, torch, both = found
    assert present.is_neighbour_of(torch)
    assert not torch.is_neighbour_of(both)
    assert Wanted(("a_b==1", "c==2")).is_neighbour_of(Wanted(("C==3", "A-B==1")))
    assert torch.is_neighbour_of(Wanted(("torch==2.15.0",)))


def test_releases_are_in_their_order(index: Path) -> None:
    names = [one.name for one in between("small-package==1.1..1.10")]
    assert names == [f"small-package=={version}" for version in ("1.1", "1.2", "1.10")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--with", "torch", "--with", "x==1"], "--with is torch; it should be NAME==VERSION"),
        (["--with", "torch==2.13.0; rm"], "NAME==VERSION"),
        (["--with=--index-url==http"], "NAME==VERSION"),
        (["--with", "torch==2.13.0"], "given with another one; present is that of now"),
        (["--with", "torch==2.13.0,torch==2.13.0"], "it should be given once"),
        (["--bisect", "small-package==1.0"], "NAME==FIRST..LAST"),
        (["--bisect", "small-package==1.0..1.3"], "1.3 is none (the last are 1.0, 1.1"),
        (["--bisect", "small-package==1.2..1.1"], "such that the first version is older"),
        (["--bisect", "no-such-package==1..2"], "a package that the index has"),
        (
            ["--with", "a==1,b==1", "--bisect", "a==1..2"],
            "it should be given without --bisect, or --bisect without it",
        ),
        (
            ["--with", "a==1,b==1", "-r", "none.txt"],
            "--requirements is none.txt; it should be a file that exists",
        ),
    ],
)
def test_bad_input_is_named(
    words: list[str], message: str, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["matrix", "tests", *words]) == BAD_INPUT
    assert message in capsys.readouterr().err
    assert not (index / "matrix").exists()


def test_an_environment_from_nothing_has_this_package_and_torch() -> None:
    torch, package = this_package(["numpy==2.4.0"])
    assert torch.startswith("torch==")
    assert this_package(["torch==2.13.0"]) == [package]
