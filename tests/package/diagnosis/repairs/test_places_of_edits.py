"""Edits are made only where they can matter, whatever else stands in the file."""

from __future__ import annotations

import ast

import pytest

from ddp_equivalence.case.edit import EditKind as Kind
from ddp_equivalence.diagnosis.repairs.find_repairs import edits_of
from tests.faulty_steps.keys import KEYS, STEPS
from tests.package.diagnosis.repairs.edited import FILE, applied, body, every_line, line_of, sources

NOT_EDITED = (
    ("the module", "size = 2 + 3\nfor i in range(2): size -= i\n"),
    ("the body of a class", "class A:\n    size = 2 + 3\n"),
    ("a docstring", body('"""One of 2 + 3."""')),
    ("an f-string", body('f"{x + 1} of {y!r:>{part}}"')),
    ("text that is put together", body('yield "%d of %d" % (x, y + 1)')),
    ("text that is formatted", body('yield "{} of {}".format(x, y + 1)')),
    ("an assert", body('assert x + 1 < y, f"{x} is not {y - 1}"')),
    ("a print", body("print(x + 1, sep=y)")),
    ("a message of a logger", body('model.log.warning("at %d", x + 1)')),
    ("a decorator", "@cached(2 + 3)\ndef f():\n    pass\n"),
    ("a default argument", "def f(x=2 + 3, *, y=not True):\n    pass\n"),
    ("an annotation", "def f(x: a[2 + 3]) -> b[1]:\n    y: c[1 + 2]\n"),
    ("an import", body("from math import pi")),
)


@pytest.mark.parametrize("source", [row[1] for row in NOT_EDITED], ids=[r[0] for r in NOT_EDITED])
def test_what_computes_nothing_is_not_edited(source: str) -> None:
    inner = [text for text, kind in sources(source).items() if kind != Kind.STATEMENT_LEFT_OUT]
    assert [text for text in inner if "return" not in text] == []


@pytest.mark.parametrize("condition", ["raise ValueError(x + 1)", "raise E from x.g(1)"])
def test_a_raise_is_not_edited(condition: str) -> None:
    source = body(f"if x:\n    {condition}\n")
    assert sources(source, [line_of(source, "raise")]) == {}


# A name for each file, the file with the marked line, and what the line becomes.
FILES = (
    ("text that is not ASCII", body('k = {"größe": 1, "n": x + y} # ä'), "x + y", "x - y"),
    ("names that are not ASCII", body("größe = x.länge + y"), "x.länge + y", "x.länge - y"),
    ("tabs", "def f(x, y):\n\tif x:\n\t\tk = x + y\n", "x + y", "x - y"),
    ("CRLF", "def f(x, y):\r\n    k = 1\r\n    k = x + y\r\n", "x + y", "x - y"),
    ("a form feed", "import os\n\x0c\ndef f(x, y):\n    k = x + y\n", "x + y", "x - y"),
    ("a byte order mark", "\ufeffdef f(x, y): return x + y\n", "x + y", "x - y"),
    ("no new line at the end", "def f(x, y): return x + y", "x + y", "x - y"),
    ("a decorator", "@ a.b(\n    1,\n)\n@c\ndef f(x, y):\n    return x + y\n", "x + y", "x - y"),
    ("a function in a function", body("def g(p):\n    return p + x\nreturn g"), "p + x", "p - x"),
    ("a lambda", "f = lambda p, q=1: p + q\n", "p + q", "p - q"),
    ("a comprehension", body("k = [p + x for p in y if p]"), "p + x", "p - x"),
    ("a generator", body("k = sum(p + x for p in y)"), "p + x", "p - x"),
    ("a match", body("match x:\n    case [p, 1] if p < y:\n        g(p)"), "p < y", "p <= y"),
    ("its body", body("match x:\n    case {'a': p}:\n        k = p + y"), "p + y", "p - y"),
    ("several lines", body("k = g(\n    x,\n    x + y,\n)"), "x + y", "x - y"),
    ("beside an f-string", body('k = x + y, f"{x+y:>3}"'), "x + y", "x - y"),
    ("an async function", "async def f(x, y):\n    await g(x + y)\n", "x + y", "x - y"),
    ("an except", body("try:\n    g()\nexcept E:\n    k = x + y"), "x + y", "x - y"),
    ("a walrus", body("if (k := x + y) > 1: g(k)"), "x + y", "x - y"),
    ("one line", body("if x: k = x + y; g(k)"), "x + y", "x - y"),
)


@pytest.mark.parametrize(
    ("source", "before", "after"), [row[1:] for row in FILES], ids=[row[0] for row in FILES]
)
def test_an_edit_changes_only_its_own_bytes(source: str, before: str, after: str) -> None:
    edited = sources(source)
    assert source.replace(before, after, 1) in edited


@pytest.mark.parametrize("source", [row[1] for row in FILES], ids=[row[0] for row in FILES])
def test_every_edit_gives_other_code_that_compiles(source: str) -> None:
    _all_are_different(source)


@pytest.mark.parametrize("key", KEYS[::20], ids=lambda key: key["file"])
def test_every_edit_of_a_step_gives_other_code_that_compiles(key: dict[str, str]) -> None:
    _all_are_different((STEPS / key["file"]).read_text("utf-8"))


def _all_are_different(source: str) -> None:
    dumps = [ast.dump(ast.parse(source.removeprefix("\ufeff")))]
    for edit in edits_of(FILE, source, every_line(source)):
        tree = ast.parse(applied(edit, source).removeprefix("\ufeff"))
        compile(tree, FILE, "exec", dont_inherit=True)
        dumps.append(ast.dump(tree))
    assert len(dumps) == len(set(dumps)) > 1


def test_only_what_begins_on_a_line_is_edited() -> None:
    source = body("k = g(\n    x + 1,\n    y.sum(),\n)\nj = x - y")
    second = line_of(source, "y.sum")
    edits = edits_of(FILE, source, [second])
    assert {edit.line for edit in edits} == {second}
    assert all("x + 1" in applied(edit, source) for edit in edits)
    assert all("j = x - y" in applied(edit, source) for edit in edits)


def test_edits_come_by_line_and_the_likeliest_of_a_line_first() -> None:
    source = body("k = x[order].detach()\nj = rank.local_rank * k.sum() // 2")
    edits = edits_of(FILE, source, every_line(source))
    assert [edit.line for edit in edits] == sorted(edit.line for edit in edits)
    second = [edit.kind for edit in edits if edit.line == edits[-1].line]
    assert second[0] == Kind.ROUNDED_UP
    assert second[-1] == Kind.DETACHED


def test_lines_that_are_moved_keep_the_line_ends_of_the_file() -> None:
    source = "def f(x):\r\n    for p in x:\r\n        p.g()\r\n        x.g()\r\n"
    moved = "def f(x):\r\n    for p in x:\r\n        p.g()\r\n        pass\r\n    x.g()\r\n"
    assert sources(source)[moved] == Kind.MOVED_OUT


def test_python_warns_of_no_edit() -> None:
    source = body("k = x is not 'a' and y != '\\d'")
    assert source.replace("is not", "is") in sources(source)


def test_a_file_that_is_no_python_has_no_edits() -> None:
    assert edits_of(FILE, "def f(:\n    return 1 +\n", [1, 2]) == []
