"""Says at which paths two descriptions differ, and makes one process like the other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddp_equivalence.ranks.user_modules.description import (
    CONSTANT,
    DICT,
    INDEX,
    KEY,
    LIST,
    MANY,
    MISSING,
    NTH_KEY,
    NTH_VALUE,
    PART_OF_CLASS,
    SET,
    TUPLE,
    Description,
    Node,
    Path,
    Step,
    prefixes,
    replace_contents,
    write,
)
from ddp_equivalence.ranks.user_modules.description import contents as contents_of
from ddp_equivalence.ranks.user_modules.description import read as read_path

SET_IT, DELETE, CONTENTS = "set", "delete", "contents"
"""What an edit does: set a value, delete it, or exchange all that a container holds."""


@dataclass(frozen=True)
class Difference:
    """``wanted`` and ``present``: the nodes at the path in both descriptions, if there are any."""

    path: Path
    action: str
    wanted: Node | None
    present: Node | None


@dataclass(frozen=True)
class Edit:
    """``steps`` lead from a module to a value. ``value``: it, or the contents that it is to have.

    ``pickled``: the value is a pickle, made once, of constants only.
    """

    steps: Path
    action: str
    value: Any = None
    pickled: bool = False


def differences(wanted: Description, present: Description) -> list[Difference]:
    """Everything to edit in a process that is as ``present``, to make it as ``wanted`` says.

    Only modules that both describe are compared. An object that is replaced is replaced wherever
    else it is held.
    """
    found: list[Difference] = []
    for name, node in wanted.nodes.items():
        if name in present.nodes and node != present.nodes[name]:
            found += _differences(node, present.nodes[name], (name,))
    whole = {one.path for one in found if one.action == SET_IT}
    contents = {one.path for one in found if one.action == CONTENTS}

    def is_replaced(path: Path) -> bool:
        return bool(
            whole.intersection(prefixes(path)) or contents.intersection(prefixes(path[:-1]))
        )

    also = {
        _holder(wanted, where)
        for where, path in wanted.seen
        if is_replaced(path) and not is_replaced(where)
    }
    return found + [
        Difference(path, action, _node_at(wanted, path), _node_at(present, path))
        for path, action in sorted(also, key=repr)
        if not is_replaced(path) and path not in contents
    ]


def _holder(description: Description, path: Path) -> tuple[Path, str]:
    """Where to set what this path leads to, and how: a tuple is replaced as a whole."""
    while (owner := _node_at(description, path[:-1])) and owner[0] in (TUPLE, PART_OF_CLASS):
        path = path[:-1]
    return (path[:-1], CONTENTS) if path[-1][0] in (NTH_KEY, NTH_VALUE) else (path, SET_IT)


def _node_at(description: Description, path: Path) -> Node | None:
    node: Node | None = description.nodes.get(path[0])
    for step in path[1:]:
        if node is None:
            return None
        node = dict(node[2]).get(step)
    return node


def _differences(wanted: Node, present: Node, path: Path) -> Iterator[Difference]:
    whole = Difference(path, SET_IT, wanted, present)
    if wanted[:2] != present[:2]:
        same_kind = wanted[0] == present[0] and _type_of(wanted) == _type_of(present)
        if same_kind and wanted[0] in (SET, MANY):
            _, immutable = _type_of(wanted)
            whole = Difference(path, SET_IT if immutable else CONTENTS, wanted, present)
        yield whole
        return
    now, then = dict(wanted[2]), dict(present[2])
    if wanted[0] in (DICT, LIST) and _must_be_refilled(list(now), list(then)):
        yield Difference(path, CONTENTS, wanted, present)
        return
    fixed = wanted[0] in (TUPLE, PART_OF_CLASS) and now.keys() != then.keys()
    found: list[Difference] = []
    for step in then:
        if step not in now:
            found.append(Difference((*path, step), DELETE, None, then[step]))
    for step, node in now.items():
        if step not in then:
            found.append(Difference((*path, step), SET_IT, node, None))
        elif node != then[step]:
            found += _differences(node, then[step], (*path, step))
    direct = [one for one in found if len(one.path) == len(path) + 1 and one.action != CONTENTS]
    if fixed or (direct and wanted[0] in (TUPLE, PART_OF_CLASS)):
        yield whole
    elif any(one.path[-1][0] in (NTH_KEY, NTH_VALUE) for one in direct):
        yield Difference(path, CONTENTS, wanted, present)
    else:
        yield from found


def _type_of(node: Node) -> Any:
    return node[1][0] if isinstance(node[1], tuple) else node[1]


def _must_be_refilled(now: list[Step], then: list[Step]) -> bool:
    """True if items cannot be set one by one: the order, or a list's length, is another one."""
    if [step for step in now if step[0] == INDEX] != [step for step in then if step[0] == INDEX]:
        return True
    common = [step for step in now if step[0] == KEY and step in set(then)]
    return common != [step for step in then if step[0] == KEY and step in set(now)] or any(
        step[0] in (NTH_KEY, NTH_VALUE) and (len(now) != len(then)) for step in now
    )


class NotRestorable(Exception):
    """The description does not hold the value at a path."""


def from_description(difference: Difference) -> Edit:
    """The edit, with the value that the wanted node holds. Raises NotRestorable."""
    steps, node = difference.path[1:], difference.wanted
    if difference.action == DELETE:
        return Edit(steps, DELETE)
    assert node is not None
    if difference.action == SET_IT:
        return Edit(steps, SET_IT, _value_of_node(node))
    if node[0] == DICT:
        return Edit(steps, CONTENTS, [(key, _value_of_node(one)) for (_, key), one in node[2]])
    if node[0] == LIST:
        return Edit(steps, CONTENTS, [_value_of_node(one) for _, one in node[2]])
    raise NotRestorable


def _value_of_node(node: Node) -> Any:
    kind, value, _ = node
    if kind != CONSTANT or not isinstance(value, tuple) or len(value) != 2:
        raise NotRestorable
    return {"float": float, "complex": complex}.get(str(value[0]), lambda same: same)(value[1])


def apply(module: object, edits: list[Edit]) -> Callable[[], None]:
    """Make these edits in a module, and return a function that takes them back."""
    undo: list[Callable[[], None]] = []

    def take_back() -> None:
        for one in reversed(undo):
            one()

    for edit in edits:
        value = pickle.loads(edit.value) if edit.pickled else edit.value
        if edit.action == CONTENTS:
            container = read_path(module, edit.steps)
            undo.append(_refill(container, contents_of(container)))
            replace_contents(container, value)
            continue
        owner, step = read_path(module, edit.steps[:-1]), edit.steps[-1]
        before = _read_or_missing(owner, step)
        if edit.action == DELETE and before is MISSING:
            continue
        undo.append(_rewrite(owner, step, before))
        write(owner, step, MISSING if edit.action == DELETE else value)
    return take_back


def _read_or_missing(owner: Any, step: Step) -> Any:
    try:
        return read_path(owner, (step,))
    except (KeyError, AttributeError, IndexError):
        return MISSING


def _refill(container: Any, items: list[Any]) -> Callable[[], None]:
    return lambda: replace_contents(container, items)


def _rewrite(owner: Any, step: Step, value: Any) -> Callable[[], None]:
    return lambda: write(owner, step, value)
