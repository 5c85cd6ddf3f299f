"""Where a definition comes from, and whether it may be sliced out of there."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_equivalence.report.script.source import Source, source_of

PACKAGE = "ddp_equivalence"

SLICED = (
    *("case.models", "case.losses", "case.build", "case.batch", "case.random_state"),
    *("case.steps", "strategies", "faults", "comparison.gradients", "comparison.chunks"),
    *("comparison.digest", "comparison.element_sample", "ranks.rank", "report.script.skeleton"),
)
"""Modules of this package whose definitions a plain script can hold."""

PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "pytest.ini", "tox.ini", ".git")

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class Origin:
    """The source of a module, and the module's names as they are now."""

    module: str
    source: Source
    namespace: dict[str, Any]

    @property
    def of_package(self) -> bool:
        return is_package(self.module)

    @property
    def of_skeleton(self) -> bool:
        return self.module.startswith(f"{PACKAGE}.report.script.")

    @property
    def stem(self) -> str:
        stem = Path(self.source.file).stem
        stem = Path(self.source.file).parent.name if stem == "__init__" else stem
        return stem if stem.isidentifier() else "cell"


def is_package(module: str) -> bool:
    """Is this a module of the package itself?"""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def may_be_sliced(module: str) -> bool:
    """May definitions of this module of the package stand in a plain script?"""
    within = module.removeprefix(f"{PACKAGE}.")
    return any(within == one or within.startswith(f"{one}.") for one in SLICED)


def is_installed(file: str) -> bool:
    """Does the file belong to Python or to an installed distribution?"""
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _INSTALLED)


def project_of(file: str) -> Path:
    """The folder of the project that a file belongs to: its own, if it is in none."""
    folder = Path(file).resolve().parent
    for one in (folder, *folder.parents):
        if any((one / name).exists() for name in PROJECT_FILES):
            return one
    return folder


def origin_of(module: ModuleType) -> Origin | None:
    """The origin of an imported module; None if it has no Python source."""
    file = getattr(module, "__file__", None)
    source = source_of(file, vars(module)) if isinstance(file, str) else None
    return Origin(module.__name__, source, vars(module)) if source else None
