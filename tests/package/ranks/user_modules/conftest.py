"""A folder for the user's modules, and the module that most tests change."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.package.ranks.user_modules.training_module import TRAIN


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder from which modules can be imported; they are forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def train(folder: Path) -> ModuleType:
    (folder / "trained.py").write_text(TRAIN)
    return importlib.import_module("trained")
