"""Tests of the package itself. Their checks are left out of the closing table, because many of them
are broken on purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_equivalence.ranks import user_modules
from ddp_equivalence.ranks.warm_ranks import warm_ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.self_check)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPUs from processes that the test starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that counts the starts of ranks begins without those of other tests, and knows no
    modules of other tests, whose changes would start new ones.
    """
    monkeypatch.setattr(user_modules, "_noticed", set())
    warm_ranks().stop()


@pytest.fixture
def forget_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Afterwards, take ``tmp_path`` from ``sys.path``, and forget the modules imported from it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]
