"""A name is exchanged only for one that can stand in its place."""

from __future__ import annotations

import pytest

from ddp_equivalence.case.edit import EditKind as Kind
from tests.package.diagnosis.repairs.edited import HEAD, body, line_of, sources

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
    assert [text for text, kind in edited.items() if kind == Kind.NAME] == [body("return y * 2")]


def test_the_line_of_a_decorator_stands_for_its_function() -> None:
    source = "@g\ndef f(x, y, part):\n    return x * 2\n"
    edited = sources(source, values={1: VALUES})
    names = [text for text, kind in edited.items() if kind == Kind.NAME]
    assert names == [source.replace("x * 2", "y * 2")]


def test_a_name_of_the_function_around_has_its_description() -> None:
    source = body("def g(k):\n    return k * 2\nreturn g")
    values = {line_of(source, "def f"): VALUES, line_of(source, "def g"): {"k": "int"}}
    names = [text for text, kind in sources(source, values=values).items() if kind == Kind.NAME]
    assert source.replace("k * 2", "order * 2") in names
    assert source.replace("k * 2", "x * 2") not in names


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("x", {Kind.DETACHED, Kind.CLONED}), ("order", set()), ("model", set())],
)
def test_only_tensors_are_detached_and_cloned(name: str, kinds: set[Kind]) -> None:
    source = body(f"return {name}")
    edited = sources(source, values={line_of(source, "def f"): VALUES})
    assert {Kind.DETACHED, Kind.CLONED} & set(edited.values()) == kinds


def test_an_attribute_that_is_no_tensor_is_not_reduced() -> None:
    source = f"{HEAD}class A:\n    def f(self, x):\n        self.n = x.g()\n"
    line = line_of(source, "def f")
    assert Kind.REDUCED in sources(source).values()
    assert Kind.REDUCED not in sources(source, values={line: {"self.n": "int"}}).values()


def test_a_name_that_has_no_value_yet_is_not_used() -> None:
    edited = sources(body("k = x * 2\nlater = y * k", "x, y"))
    assert not any("later * 2" in text or "k = k" in text for text in edited)


def test_a_name_with_another_annotation_is_not_used() -> None:
    edited = sources(body("return x * 2", "x: int, y: int, name: str"))
    assert body("return y * 2", "x: int, y: int, name: str") in edited
    assert not any("name * 2" in text for text in edited)


IMPORTS = (
    ("import torch", "torch.distributed.all_reduce(k)"),
    ("import torch as t", "t.distributed.all_reduce(k)"),
    ("import torch.distributed", "torch.distributed.all_reduce(k)"),
    ("import torch.distributed as dist", "dist.all_reduce(k)"),
    ("from torch import distributed as d", "d.all_reduce(k)"),
    ("from torch.distributed import all_reduce", "all_reduce(k)"),
)


@pytest.mark.parametrize(("imported", "call"), IMPORTS)
def test_a_collective_is_written_with_what_the_file_imports(imported: str, call: str) -> None:
    source = f"{imported}\ndef f(x):\n    k = x.g()\n    return k\n"
    assert source.replace("x.g()", f"x.g(); {call}") in sources(source)


def test_without_an_import_there_is_no_collective() -> None:
    assert Kind.REDUCED not in sources("def f(x):\n    k = x.g()\n    return k\n").values()


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
    assert source.replace("return x", f"return x / {world_size}") in sources(source)
