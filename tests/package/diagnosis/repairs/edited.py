"""Makes the edits of a short source, for the tests of repairs."""

from __future__ import annotations

import textwrap
from collections.abc import Collection

from ddp_equivalence.case.edit import Edit, EditKind
from ddp_equivalence.diagnosis.repairs.find_repairs import edits_of
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
) -> dict[str, EditKind]:
    """The sources that the edits give, each with the kind of the edit."""
    edits = edits_of(FILE, source, every_line(source) if lines is None else lines, values)
    return {applied(edit, source): edit.kind for edit in edits}


def applied(edit: Edit, source: str) -> str:
    encoded = source.encode()
    return (encoded[: edit.start] + edit.text.encode() + encoded[edit.end :]).decode()
