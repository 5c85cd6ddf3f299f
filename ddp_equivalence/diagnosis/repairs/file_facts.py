"""What a file says of its classes, functions, strings and imports, which edits make use of."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property

from ddp_equivalence.diagnosis.repairs.classes import attributes_of_classes
from ddp_equivalence.diagnosis.repairs.names_in_scope import Function
from ddp_equivalence.diagnosis.repairs.source import Source
from ddp_equivalence.diagnosis.repairs.strings import Strings


class FileFacts:
    """Facts of one file; each is computed when an edit first asks for it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @cached_property
    def attributes(self) -> dict[str, list[str]]:
        """The attributes that the file reads or sets on an expression, which is not called.

        Those of ``self`` have the name of their class before them, as in ``Trainer.self``.
        """
        found: dict[str, list[str]] = defaultdict(list)
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Attribute) and not self._is_called(node):
                known = found[self.owner(node.value)]
                if node.attr not in known:
                    known.append(node.attr)
        return dict(found)

    def owner(self, node: ast.expr) -> str:
        """A name for the object that an expression stands for."""
        text = self._source.text(node)
        first, dot, rest = text.partition(".")
        return f"{self.owner_of_self(node)}{dot}{rest}" if first == "self" else text

    def owner_of_self(self, node: ast.AST) -> str:
        """A name for what ``self`` is at a node."""
        around = self._source.nearest(node, ast.ClassDef)
        return f"{around.name if around else ''}.self"

    def own_attributes(self, node: ast.AST) -> list[str]:
        """The attributes of ``self`` at a node, as in ``self.count``."""
        return [f"self.{name}" for name in self.attributes.get(self.owner_of_self(node), [])]

    def _is_called(self, node: ast.expr) -> bool:
        parent = self._source.parents[node]
        return isinstance(parent, ast.Call) and parent.func is node

    @cached_property
    def modules(self) -> dict[str, str]:
        """The modules and functions that the file imports, by the names that it gives them."""
        found: dict[str, str] = {}
        for node in ast.walk(self._source.tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    whole = one.name if one.asname else one.name.split(".")[0]
                    found[one.asname or whole] = whole
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for one in node.names:
                    found[one.asname or one.name] = f"{node.module}.{one.name}"
        return found

    def imported_as(self, name: str) -> str | None:
        """How the file can write something of torch, such as "torch.distributed.all_reduce".

        What the file has imported is used, and nothing is imported in addition: a reader copies
        the edit as it stands.
        """
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            for alias, whole in self.modules.items():
                if whole == prefix:
                    return ".".join([alias, *parts[length:]])
        return None

    @cached_property
    def world_size(self) -> str | None:
        """How the file can ask for the world size."""
        called = self.imported_as("torch.distributed.get_world_size")
        return f"{called}()" if called else None

    @cached_property
    def all_reduce(self) -> str | None:
        """How the file can call all_reduce."""
        return self.imported_as("torch.distributed.all_reduce")

    @cached_property
    def get_rank(self) -> str | None:
        """How the file can ask for the number of this rank."""
        called = self.imported_as("torch.distributed.get_rank")
        return f"{called}()" if called else None

    @cached_property
    def classes(self) -> list[dict[str, str]]:
        """For each class its attributes, with what the source says of their values."""
        return attributes_of_classes(self._source.tree)

    def attributes_beside(self, node: ast.Attribute) -> list[str]:
        """Other attributes that the object of this one has; those known to be like it first.

        Those of another type are left out.
        """
        alike: list[str] = []
        unknown = list(self.attributes.get(self.owner(node.value), []))
        for attributes in self.classes:
            own = attributes.get(node.attr)
            if own is not None:
                alike += [name for name, text in attributes.items() if own and text == own]
                unknown += [name for name, text in attributes.items() if not (own and text)]
                others = {name for name, text in attributes.items() if own and text}
                unknown = [name for name in unknown if name not in others]
        found = dict.fromkeys([*alike, *unknown])
        return [name for name in found if name != node.attr and not name.startswith("__")]

    @cached_property
    def strings(self) -> Strings:
        """The strings of the file, and which can stand for each other."""
        return Strings(self._source.tree)

    @cached_property
    def constants(self) -> list[str]:
        """The numbers that the module defines at its top."""
        return [
            target.id
            for node in self._source.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and isinstance(node.value.value, int | float)
        ]

    def functions_at(self, node: ast.AST) -> dict[str, int]:
        """The functions of the file that can be called at a node, with the arguments they need.

        Methods of the class around the node have ``self.`` before them. Functions around the
        node are left out, and those that call them, so that none calls itself. What is called
        nowhere in the file is not for this file to call.
        """
        around = list(self._source.parents_of(node))
        names = {one.name for one in around if isinstance(one, ast.FunctionDef)}
        in_class = self._source.nearest(node, ast.ClassDef)
        listed = [("", one) for one in self._source.tree.body]
        listed += [("self.", one) for one in in_class.body] if in_class else []
        return {
            before + one.name: _needed_arguments(one, skip=bool(before))
            for before, one in listed
            if isinstance(one, ast.FunctionDef)
            and one not in around
            and one.name in self._called
            and _returns_something(one)
            and not names & _names_in(one)
            and not one.decorator_list
            and not one.name.startswith("__")
        }

    @cached_property
    def _called(self) -> set[str]:
        calls = [node.func for node in ast.walk(self._source.tree) if isinstance(node, ast.Call)]
        return {one.id for one in calls if isinstance(one, ast.Name)} | {
            one.attr for one in calls if isinstance(one, ast.Attribute)
        }


def _returns_something(function: ast.FunctionDef) -> bool:
    is_said = isinstance(function.returns, ast.Constant) and function.returns.value is None
    return not is_said and any(
        isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function)
    )


def _names_in(function: ast.FunctionDef) -> set[str]:
    return {one.id for one in ast.walk(function) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(function) if isinstance(one, ast.Attribute)
    }


def _needed_arguments(function: Function, skip: bool) -> int:
    arguments = function.args
    if arguments.vararg or any(default is None for default in arguments.kw_defaults):
        return 0
    return len(arguments.posonlyargs + arguments.args) - len(arguments.defaults) - skip
