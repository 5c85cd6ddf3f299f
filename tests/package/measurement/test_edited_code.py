"""Functions of a file run as edited inside a block, and as they were afterwards."""

from __future__ import annotations

import ast
import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ddp_equivalence.measurement.edited_code import (
    CannotEdit,
    EditedCode,
    functions_of,
    run_as_edited,
)
from ddp_equivalence.ranks import pickling

FUNCTIONS = {
    "a function": """
        def f():
            return 1
        call = f
        """,
    "a method": """
        class C:
            def f(self):
                return 1
        call = C().f
        """,
    "a property": """
        class C:
            @property
            def f(self):
                return 1
        def call():
            return C().f
        """,
    "a function with a decorator that wraps it": """
        import functools
        def twice(f):
            @functools.wraps(f)
            def both(*arguments):
                f(*arguments)
                return f(*arguments)
            return both
        @twice
        def call():
            return 1
        """,
    "a function that a cache holds": """
        import functools
        @functools.lru_cache
        def f():
            return 1
        def call():
            f.cache_clear()
            return f()
        """,
    "a closure that exists": """
        def make(value):
            def inner():
                return value + 0 and 1
            return inner
        call = make(3)
        """,
    "a partial": """
        import functools
        call = functools.partial(lambda x: x and 1, 5)
        """,
    "a method that calls super": """
        class A:
            def f(self):
                return 0
        class C(A):
            def f(self):
                return super().f() + 1
        call = C().f
        """,
    "annotations that are never evaluated": """
        from __future__ import annotations
        def call(y: NoSuchName = None) -> NoSuchName:
            def inner(x: NoSuchName = None):
                return 1
            return inner()
        """,
}


def module_of(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> ModuleType:
    """A module of a user with this text, which stays imported until the test ends."""
    path = folder / "users_code.py"
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    spec = importlib.util.spec_from_file_location("users_code", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "users_code", module)
    spec.loader.exec_module(module)
    return module


def change_of(kind: str) -> tuple[str, str]:
    return ("+ 1", "+ 2") if "+ 1" in FUNCTIONS[kind] else (" 1", " 2")


def edit(module: ModuleType, before: str, after: str) -> EditedCode:
    """The last statement of the file, or all of it, with this text in place of that."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(before) == 1
    one, other = (ast.parse(each) for each in (text, text.replace(before, after)))
    if ast.dump(one.body[-1]) != ast.dump(other.body[-1]):
        one.body, other.body = one.body[-1:], other.body[-1:]
    return EditedCode(module.__file__, one, other)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_runs_as_edited_inside_the_block_only(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, FUNCTIONS[kind])
    with run_as_edited(edit(module, *change_of(kind)), ()):
        assert module.call() == 2
    assert module.call() == 1


@pytest.mark.parametrize("kind", sorted(FUNCTIONS.keys() - {"a function that a cache holds"}))
def test_a_function_that_was_sent_by_value_runs_as_edited(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, FUNCTIONS[kind])
    module.__dict__["__name__"] = "users_code"
    edited = edit(module, *change_of(kind))
    *_, work = pickling.split(pickling.dumps(_called, module.call))
    monkeypatch.delitem(sys.modules, "users_code")
    _, sent, _ = pickling.loads(work)
    with run_as_edited(edited, (sent,)):
        assert sent() == 2
    assert sent() == 1


def _called(function: Any) -> Any:
    return function()


def test_the_code_is_put_back_after_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, FUNCTIONS["a function"])
    edited = edit(module, "return 1", "raise KeyError")
    with pytest.raises(KeyError), run_as_edited(edited, ()):
        module.call()
    assert module.call() == 1


def test_lines_of_edited_code_have_the_numbers_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, "X = 1\n\n\ndef call():\n    return 1\n")
    edited = edit(module, "return 1", "raise KeyError")
    with pytest.raises(KeyError) as raised, run_as_edited(edited, ()):
        module.call()
    assert raised.traceback[-1].lineno == 5 - 1


def test_of_two_functions_with_the_same_name_only_the_edited_one_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        if True:
            def f():
                return 1
            first = f
            def f():
                return 3
            calls = [lambda: 5, lambda: 7]
        """
    module = module_of(tmp_path, monkeypatch, text)
    with run_as_edited(edit(module, "3", "4"), ()):
        assert (module.first(), module.f()) == (1, 4)
    with run_as_edited(edit(module, "7", "8"), ()):
        assert [call() for call in module.calls] == [5, 8]


def test_functions_that_cannot_be_told_apart_are_not_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, "calls = [lambda: 5, lambda: 7]\n")
    edited = edit(module, "lambda: 5, ", "")
    with pytest.raises(CannotEdit, match="no function"), run_as_edited(edited, ()):
        pass
    assert [call() for call in module.calls] == [5, 7]


@pytest.mark.parametrize("other", ["b", "a + b"])
def test_a_closure_that_would_need_other_variables_cannot_be_edited(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        def make(a, b):
            def inner():
                return a
            return inner
        call = make(1, 2)
        """
    module = module_of(tmp_path, monkeypatch, text)
    edited = edit(module, "return a", f"return {other}")
    with pytest.raises(CannotEdit, match="variables of its closure"), run_as_edited(edited, ()):
        pass
    assert module.call() == 1
    assert module.make(1, 2)() == 1


def test_what_ran_when_the_file_was_imported_cannot_be_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, "def call(value=1):\n    return value\n")
    edited = edit(module, "value=1", "value=2")
    with pytest.raises(CannotEdit, match="no function"), run_as_edited(edited, ()):
        pass


def test_a_function_whose_source_has_changed_since_its_import_is_not_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def call(x=3):\n    return max(x - 2, 1)\n"
    module = module_of(tmp_path, monkeypatch, text)
    assert module.__file__ is not None
    for changed in (text.replace("-", "+"), text.replace("2", "0"), text.replace("max", "min")):
        Path(module.__file__).write_text(changed)
        edited = edit(module, ", 1", ", 5")
        with pytest.raises(CannotEdit, match="no function"), run_as_edited(edited, ()):
            pass
    assert module.call() == 1


class Strange:
    """An object of a user that answers whatever it is asked with an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_objects_that_answer_anything_are_only_passed_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, FUNCTIONS["a function"])
    assert module.__file__ is not None
    module.__dict__["strange"] = Strange()
    assert [one.__name__ for one in functions_of(module.__file__, (Strange(),))] == ["f"]


def test_functions_are_found_before_what_many_objects_lead_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_equivalence.measurement.edited_code.MOST_OBJECTS", 500)
    many = "        many = [[[i] for i in range(30)] for _ in range(30)]\n"
    text = f"{FUNCTIONS['a method']}\n{many}"
    module = module_of(tmp_path, monkeypatch, text)
    assert module.__file__ is not None
    assert [one.__name__ for one in functions_of(module.__file__, ())] == ["f"]


def test_classes_that_are_written_in_c_lead_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tmp_path, monkeypatch, FUNCTIONS["a function"])
    monkeypatch.setitem(sys.modules, "another", other := ModuleType("another"))
    other.__dict__["f"] = module.__dict__.pop("f")
    del module.__dict__["call"]
    module.__dict__["another"] = other
    assert module.__file__ is not None
    assert functions_of(module.__file__, ()) == []
