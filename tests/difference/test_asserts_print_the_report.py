"""A test of this folder that fails prints the report, not a part of the verdict's fields."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.self_check

FILES = tuple(sorted(set(Path(__file__).parent.glob("test_*.py")) - {Path(__file__)}))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_assert_has_the_report_as_its_message(file: Path) -> None:
    """Pytest cuts the message of an assert to one line unless it is a string."""
    tree = ast.parse(file.read_text("utf-8"))
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    messages = [node.msg and ast.unparse(node.msg) for node in asserts]
    assert messages
    assert set(messages) == {"str(verdict)"}
