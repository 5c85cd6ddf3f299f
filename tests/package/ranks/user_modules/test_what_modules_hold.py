"""What a module holds can be changed in every place, and is put back as it was."""

from __future__ import annotations
import __future__

from collections import OrderedDict
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from ddp_equivalence.ranks.module_contents import Contents, held, text


class Named(dict[str, int]):
    """A dict with attributes of its own."""


class WithSlots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


def counting() -> Any:
    count, unset = 0, 0
    del unset

    def count_up(step: int = 1) -> int:
        nonlocal count, unset
        if step == 2:
            unset = 1
        count += step
        return count

    return count_up


def module_with_everything() -> Any:
    module: Any = ModuleType("made_for_this_test")
    module.Class = type("Class", (), {"value": 1, "__module__": module.__name__})
    module.items, module.ordered = [1, [2]], OrderedDict(a=1, b=2)
    module.named, module.slots, module.count_up = Named(a=1), WithSlots(), counting()
    module.named.extra = 1
    module.context = ContextVar("context", default=0)
    module.context.set(1)
    return module


def test_a_module_holds_the_same_whichever_module_was_imported_before() -> None:
    """What belongs to Python is in both; ranks would be replaced in vain if the order counted."""
    first, second = ModuleType("first"), ModuleType("second")
    for module in (first, second):
        module.annotations = __future__.annotations  # type: ignore[attr-defined]
    assert Contents([first, second]).rows["second"] == Contents([second]).rows["second"]


def test_everything_that_is_changed_is_put_back() -> None:
    module = module_with_everything()
    before, names = Contents([module]), held(module)
    module.Class.value, module.Class.new = 2, 2
    module.items[1].append(3)
    module.items.insert(0, 0)
    module.ordered.move_to_end("a")
    module.named.update(a=2, b=2)
    del module.named.extra
    module.slots.value = 2
    module.count_up.__defaults__ = (2,)
    module.count_up()
    module.count_up.calls = 1
    module.context.set(2)
    module.new = 2
    del module.items
    assert Contents([module]).rows != before.rows
    before.put_back()
    assert Contents([module]).rows == before.rows
    assert all(held(module)[step] is value for step, value in names.items())
    assert (module.items, list(module.ordered), module.count_up()) == ([1, [2]], ["a", "b"], 1)


def test_a_path_is_written_as_a_user_writes_it() -> None:
    table = Contents([module_with_everything()])
    paths = {
        text((*path, step))
        for path, row in table.rows["made_for_this_test"].items()
        for step in row.items
    }
    assert "made_for_this_test.items[1][0]" in paths
    assert {
        "made_for_this_test.ordered['a']",
        "made_for_this_test.count_up.__closure__[0]",
    } <= paths
