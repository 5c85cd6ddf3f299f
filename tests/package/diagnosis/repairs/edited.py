"""Makes the edits of a short source, for the tests of repairs."""

from __future__ import annotations

import ast
import textwrap
import warnings
from collections.abc import Collection

from ddp_equivalence.diagnosis.repairs.edits import Edit, edits_of
from ddp_equivalence.diagnosis.repairs.source import Values

FILE = "user.py"

HEAD = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
"""


def body(text: str, parameters: str = "x, y, part, order, rank, model") -> str:
    """A file with one function, which has this text as its body."""
    return f"{HEAD}def f({parameters}):\n{textwrap.indent(textwrap.dedent(text), '    ')}"


def line_of(source: str, marked: str) -> int:
    """The number of the only line that begins with this text."""
    lines = source.splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.strip().startswith(marked)]
    return number


def every_line(source: str) -> Collection[int]:
    return range(1, source.count("\n") + 2)


def sources(
    source: str, lines: Collection[int] | None = None, values: Values | None = None
) -> dict[str, Edit]:
    """The sources that the edits give, as Python writes them, each with its edit."""
    edits = edits_of(FILE, source, every_line(source) if lines is None else lines, values)
    return {applied(edit, source): edit for edit in edits}


def applied(edit: Edit, source: str) -> str:
    """The whole file after an edit."""
    tree = parsed(source)
    (before,), (after,) = edit.code.before.body, edit.code.after.body
    tree.body = [after if ast.dump(one) == ast.dump(before) else one for one in tree.body]
    return ast.unparse(tree)


def written(source: str) -> str:
    """A source as Python writes it."""
    return ast.unparse(parsed(source))


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source, of which Python may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source.removeprefix("\ufeff"))
