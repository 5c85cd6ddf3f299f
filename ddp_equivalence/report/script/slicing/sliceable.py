"""Which modules a script may take definitions from; it imports all others."""

from __future__ import annotations

import sysconfig
from pathlib import Path

PACKAGE = "ddp_equivalence"
TEMPLATE = f"{PACKAGE}.report.script.template"

SLICEABLE = (
    *("case.models", "case.losses", "case.build", "case.batch", "case.batch_tree"),
    *("case.precision", "case.random_state", "case.steps", "strategies", "faults"),
    *("comparison.gradients", "comparison.chunks", "comparison.digest"),
    *("comparison.element_sample", "ranks.rank", "report.script.template"),
)
"""The modules and folders of this package whose definitions a plain script may contain."""

PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "pytest.ini", "tox.ini", ".git")

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_own_module(module: str) -> bool:
    """True for a module of this package."""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def may_be_sliced(own_module: str) -> bool:
    """True if a plain script may contain definitions of this module of the package."""
    name = own_module.removeprefix(f"{PACKAGE}.")
    return any(name == entry or name.startswith(f"{entry}.") for entry in SLICEABLE)


def is_installed(file: str) -> bool:
    """True if the file belongs to Python or to an installed distribution."""
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _INSTALLED)


def project_of(file: str) -> Path:
    """The folder of the project that a file belongs to; the file's own folder if it is in none."""
    folder = Path(file).resolve().parent
    for candidate in (folder, *folder.parents):
        if any((candidate / name).exists() for name in PROJECT_FILES):
            return candidate
    return folder
