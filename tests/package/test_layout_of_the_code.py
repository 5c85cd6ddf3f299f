"""The package stays readable: short files, short functions, and few entries at its root."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import conftest as thorough

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ddp_equivalence"
FILES = sorted(PACKAGE.rglob("*.py"))

MOST_LINES_OF_A_FILE = 300
MOST_LINES_OF_A_FUNCTION = 60
MOST_ROOT_ENTRIES = 15
NOT_COUNTED_AT_THE_ROOT = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}


def test_no_file_is_too_long() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in FILES}
    too_long = [
        f"{file.relative_to(ROOT)}: {length} lines, limit {MOST_LINES_OF_A_FILE}"
        for file, length in lengths.items()
        if length > MOST_LINES_OF_A_FILE
    ]
    assert not too_long, "\n".join(["Split these files:", *too_long])


def test_no_function_is_too_long() -> None:
    """A function is counted from its ``def`` to its last line, with its docstring."""
    too_long = [
        f"{file.relative_to(ROOT)}:{function.lineno} {function.name}: "
        f"{length} lines, limit {MOST_LINES_OF_A_FUNCTION}"
        for file in FILES
        for function, length in lengths_of_functions(file)
        if length > MOST_LINES_OF_A_FUNCTION
    ]
    assert not too_long, "\n".join(["Split these functions:", *too_long])


def test_the_root_of_the_package_has_few_entries() -> None:
    entries = sorted({path.name for path in PACKAGE.iterdir()} - NOT_COUNTED_AT_THE_ROOT)
    count = f"{len(entries)} entries, limit {MOST_ROOT_ENTRIES}"
    assert len(entries) <= MOST_ROOT_ENTRIES, f"ddp_equivalence/: {count}: {', '.join(entries)}"


def lengths_of_functions(
    file: Path,
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node, node.end_lineno - node.lineno + 1


def test_the_files_of_which_a_part_runs_in_every_change_exist() -> None:
    tests = Path(thorough.__file__).parent
    assert [file for file in thorough.ONE_OF if not (tests / file).exists()] == []
