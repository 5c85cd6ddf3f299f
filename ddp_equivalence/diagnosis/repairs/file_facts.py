"""What a file says of its classes, functions, strings and imports, which edits make use of."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cached_property

from ddp_equivalence.diagnosis.repairs.source import Source


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
        if text.split(".")[0] == "self":
            around = self._source.nearest(node, ast.ClassDef)
            return f"{around.name if around else ''}.{text}"
        return text

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
