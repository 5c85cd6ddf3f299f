"""Edits are made only where they can matter, with names that can stand there, and once each."""

from __future__ import annotations

import ast

import pytest

from ddp_equivalence.diagnosis.repairs.edits import edits_of
from tests.package.diagnosis.repairs.edited import (
    FILE,
    HEAD,
    applied,
    body,
    every_line,
    line_of,
    sources,
    written,
)

NOT_EDITED = {
    "the module": "size = 2 + 3\nfor i in range(2): size -= i\n",
    "the body of a class": "class A:\n    size = 2 + 3\n",
    "a docstring": body('"""One of 2 + 3."""'),
    "an f-string": body('f"{x + 1} of {y!r:>{part}}"'),
    "text that is put together": body('yield "%d of %d" % (x, y + 1)'),
    "text that is formatted": body('yield "{} of {}".format(x, y + 1)'),
    "an assert": body('assert x + 1 < y, f"{x} is not {y - 1}"'),
    "a raise": body("raise ValueError(x + 1)"),
    "a print": body("print(x + 1, sep=y)"),
    "a message of a logger": body('model.log.warning("at %d", x + 1)'),
    "a decorator": "@cached(2 + 3)\ndef f():\n    pass\n",
    "a default argument": "def f(x=2 + 3, *, y=not True):\n    pass\n",
    "an annotation": "def f(x: a[2 + 3]) -> b[1]:\n    y: c[1 + 2]\n",
    "an import": body("from math import pi"),
    "no Python": "def f(:\n    return 1 +\n",
}


@pytest.mark.parametrize("source", NOT_EDITED.values(), ids=NOT_EDITED)
def test_what_computes_nothing_is_not_edited(source: str) -> None:
    edits = edits_of(FILE, source, every_line(source))
    assert {edit.after for edit in edits} <= {"pass"}


# Files with a sum, of which one edit makes a difference.
FILES = {
    "text that is not ASCII": body('größe = {"größe": 1, "n": x + y} # ä'),
    "tabs": "def f(x, y):\n\tif x:\n\t\tk = x + y\n",
    "CRLF": "def f(x, y):\r\n    k = 1\r\n    k = x + y\r\n",
    "a byte order mark": "\ufeffdef f(x, y): return x + y\n",
    "a decorator": "@ a.b(\n    1,\n)\n@c\ndef f(x, y):\n    return x + y\n",
    "a function in a function": body("def g(p):\n    return x + y\nreturn g"),
    "a lambda": "f = lambda x, y=1: x + y\n",
    "a comprehension": body("k = [x + y for p in y if p]"),
    "a match": body("match x:\n    case {'a': p}:\n        k = x + y"),
    "several lines": body("k = g(\n    x,\n    x + y,\n)"),
    "an async function": "async def f(x, y):\n    await g(x + y)\n",
    "a walrus": body("if (k := x + y) > 1: g(k)"),
    "one line": body("if x: k = x + y; g(k)"),
}


@pytest.mark.parametrize("source", FILES.values(), ids=FILES)
def test_every_edit_gives_other_code_that_compiles(source: str) -> None:
    edits = edits_of(FILE, source, every_line(source))
    texts = [applied(edit, source) for edit in edits]
    assert written(source.replace("x + y", "x - y")) in texts
    dumps = [ast.dump(ast.parse(text)) for text in (written(source), *texts)]
    assert len(dumps) == len(set(dumps))
    for edit in edits:
        compile(edit.code.after, FILE, "exec", dont_inherit=True)


def test_only_what_begins_on_a_line_is_edited() -> None:
    source = body("k = g(\n    x + 1,\n    y.sum(),\n)\nj = x - y")
    second = line_of(source, "y.sum")
    edits = edits_of(FILE, source, [second])
    assert {edit.line for edit in edits} == {second}
    assert all("x + 1" in applied(edit, source) for edit in edits)


def test_edits_come_by_line_and_the_likeliest_of_a_line_first() -> None:
    source = body("k = x[order].detach()\nj = rank.local_rank * k.sum() // 2")
    edits = edits_of(FILE, source, every_line(source))
    assert [(edit.line, edit.place) for edit in edits] == sorted((e.line, e.place) for e in edits)


def test_the_smallest_part_that_changes_is_shown_with_its_line() -> None:
    source = body("for p in x:\n    if y:\n        p.g()\n    y.g(\n        1 + 2,\n        k=3)")
    edits = edits_of(FILE, source, every_line(source))
    shown = {(edit.line, edit.before, edit.after) for edit in edits}
    assert (line_of(source, "1 + 2"), "1 + 2", "1 - 2") in shown
    assert (line_of(source, "if y"), "y", "not y") in shown


def test_python_warns_of_no_edit() -> None:
    source = body("k = x is not 'a' and y != '\\d'")
    assert written(source.replace("is not", "is")) in sources(source)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("clip_grad_norm_", "clip_grad_value_"),
        ("F.dropout(rows)", "rows"),
        ("value + penalty", "value"),
    ],
)
def test_no_edit_takes_away_what_somebody_wanted(before: str, after: str) -> None:
    text = "def step(value, rows, penalty):\n"
    text += "    return clip_grad_norm_(F.dropout(rows), value + penalty)\n"
    assert written(text.replace(before, after)) not in sources(text)


def test_no_edit_undoes_another_one_of_the_same_kind() -> None:
    text = "def f(count, ranks):\n    return {}\n"
    assert any("-(-count // ranks)" in one for one in sources(text.format("count // ranks")))
    assert not any("--" in one for one in sources(text.format("-(-count // ranks)")))


VALUES = {
    "x": "tensor float 3x4",
    "y": "tensor float 3x4",
    "part": "tensor int 3",
    "order": "int",
    "rank": "Rank",
    "model": "Model",
}


def test_a_name_is_exchanged_only_for_one_with_the_same_description() -> None:
    source = body("return x * 2")
    edited = sources(source, values={line_of(source, "def f"): VALUES})
    names = [edit.after for edit in edited.values() if edit.before == "x"]
    assert "y" in names
    assert not {"part", "order", "rank", "model"} & set(names)


def test_a_name_of_the_function_around_has_its_description() -> None:
    source = body("@h\ndef g(k):\n    return k * 2\nreturn g")
    values = {line_of(source, "def f"): VALUES, line_of(source, "@h"): {"k": "int"}}
    edited = sources(source, values=values)
    assert written(source.replace("k * 2", "order * 2")) in edited
    assert written(source.replace("k * 2", "x * 2")) not in edited


@pytest.mark.parametrize(("name", "is_tensor"), [("x", True), ("order", False), ("model", False)])
def test_only_tensors_are_detached(name: str, is_tensor: bool) -> None:
    source = body(f"return {name}")
    edited = sources(source, values={line_of(source, "def f"): VALUES})
    assert (written(body(f"return {name}.detach()")) in edited) == is_tensor


def test_an_attribute_that_is_no_tensor_is_not_reduced() -> None:
    source = f"{HEAD}class A:\n    def f(self, x):\n        self.n = x.g()\n"
    values = {line_of(source, "def f"): {"self.n": "int"}}
    assert any("all_reduce" in text for text in sources(source))
    assert not any("all_reduce" in text for text in sources(source, values=values))


def test_a_name_that_has_no_value_yet_is_not_used() -> None:
    edited = sources(body("k = x * 2\nlater = y * k", "x, y"))
    assert not any("later * 2" in text or "k = k" in text for text in edited)


IMPORTS = (
    ("import torch", "torch.distributed.all_reduce(k)"),
    ("import torch as t", "t.distributed.all_reduce(k)"),
    ("import torch.distributed as dist", "dist.all_reduce(k)"),
    ("from torch import distributed as d", "d.all_reduce(k)"),
    ("from torch.distributed import all_reduce", "all_reduce(k)"),
)


@pytest.mark.parametrize(("imported", "call"), IMPORTS)
def test_a_collective_is_written_with_what_the_file_imports(imported: str, call: str) -> None:
    source = f"{imported}\ndef f(x):\n    k = x.g()\n    return k\n"
    assert written(source.replace("x.g()", f"x.g(); {call}")) in sources(source)


def test_without_an_import_there_is_no_collective() -> None:
    assert not any("all_reduce" in one for one in sources("def f(x):\n    k = x.g()\n    return k"))


@pytest.mark.parametrize(
    ("source", "world_size"),
    [
        ("def f(x, rank):\n    g(rank.rank)\n    return x\n", "rank.world_size"),
        (
            "class A:\n    def f(self, x):\n        self.rank = self.rank.rank\n        return x\n",
            "self.rank.world_size",
        ),
        (
            "class A:\n    def f(self, x):\n        g(self.world_size)\n        return x\n",
            "self.world_size",
        ),
    ],
)
def test_without_an_import_the_rank_is_asked_for_the_world_size(
    source: str, world_size: str
) -> None:
    assert written(source.replace("return x", f"return x / {world_size}")) in sources(source)
