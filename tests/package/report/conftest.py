"""A user's file, for the tests of exported scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package.report.exported_scripts import BESIDE, MINE


@pytest.fixture
def their_file(tmp_path: Path, forget_imports: None) -> Path:
    """A user's file. Modules that are imported from its folder are removed afterwards."""
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path
