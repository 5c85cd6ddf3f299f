"""Find the suite's tests: beside the package in a checkout, or inside the installed package."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ddp_equivalence.case.errors import SuiteBug

PACKAGE = Path(__file__).resolve().parent.parent

TESTS = "tests/equivalence tests/difference tests/diagnosis/test_planted_faults.py"
"""The tests that compare, in this folder; the others check the suite itself."""

OPTIONS_OF_SUITE = ("-o", f"testpaths={TESTS}", "-W", "default")
"""The options with which pytest runs them in the suite's folder. A warning is an error in the tests
of this package, and not on a user's machine, where other plugins of pytest and other versions of
torch warn of what is none of our business."""


def suite_folder() -> Path:
    """The folder with pytest.ini, conftest.py and tests/. Raises SuiteBug if there is none."""
    for folder in (PACKAGE.parent, PACKAGE / "suite"):
        if (folder / "tests" / "equivalence").is_dir() and (folder / "pytest.ini").is_file():
            return folder
    raise SuiteBug(f"the suite's tests are neither beside {PACKAGE} nor in it")


def is_checkout() -> bool:
    """True if the suite lies beside the package."""
    return suite_folder() == PACKAGE.parent


def cache_folder() -> Path:
    """A folder for pytest's cache where that must not lie beside the tests."""
    return Path(tempfile.gettempdir()) / f"ddp_equivalence-pytest-cache-{os.getuid()}"
