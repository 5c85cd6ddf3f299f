"""Environments of their own for released versions, one at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]

TORCH = "torch==2.13.0"

GIGABYTES = 2.0
"""What one environment takes on the disk: torch for the CPU alone takes 0.8 GB of it."""


@contextmanager
def environment(folder: Path, requirements: Sequence[str], uv: str | None) -> Iterator[Path]:
    """The Python of a new environment in ``folder`` with torch, this package and ``requirements``.

    The folder is deleted afterwards. One that is there already was kept, and is used and kept.
    """
    python = folder / "bin" / "python"
    kept = python.exists()
    if not kept:
        _install(folder, python, requirements, uv)
    try:
        yield python
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept_environment(folder: Path, requirements: Sequence[str], uv: str | None) -> Iterator[Path]:
    """The same, and the folder stays."""
    python = folder / "bin" / "python"
    if not python.exists():
        _install(folder, python, requirements, uv)
    yield python


def _install(folder: Path, python: Path, requirements: Sequence[str], uv: str | None) -> None:
    if uv is None:
        run([sys.executable, "-m", "venv", str(folder)])
        installer = [str(python), "-m", "pip", "install", "--quiet"]
    else:
        run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)])
        installer = [uv, "pip", "install", "--quiet", "--python", str(python)]
    try:
        run([*installer, TORCH, *requirements, "--editable", str(CHECKOUT)])
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def run(command: Sequence[str], log: Path | None = None) -> int:
    """Run a command outside any virtual environment of the caller.

    With ``log``, its output goes there, and its exit code is returned. Without, a command that
    fails raises CalledProcessError.
    """
    variables = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    if log is None:
        return subprocess.run(command, env=variables, check=True).returncode
    with log.open("w", encoding="utf-8") as output:
        return subprocess.run(
            command, env=variables, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
