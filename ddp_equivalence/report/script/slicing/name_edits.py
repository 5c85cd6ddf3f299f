"""Edit a fragment so that its free names have the same values in the script."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ddp_equivalence.case.case import Case
from ddp_equivalence.report.script.slicing.annotations import (
    can_stay,
    signature_annotations,
    variable_annotation,
)
from ddp_equivalence.report.script.slicing.contents import Contents, Fragment
from ddp_equivalence.report.script.slicing.definitions import Definitions
from ddp_equivalence.report.script.slicing.import_resolver import ImportResolver
from ddp_equivalence.report.script.slicing.scopes import FreeName, Scopes
from ddp_equivalence.report.script.slicing.source import Edit
from ddp_equivalence.report.script.slicing.source_module import SourceModule


class NameEdits:
    """Brings the definition of every free name into the script, and renames where needed."""

    def __init__(
        self, contents: Contents, imports: ImportResolver, definitions: Definitions
    ) -> None:
        self._contents, self._names = contents, contents.names
        self._imports = imports
        self._definitions = definitions

    def edit(
        self, fragment: Fragment, scopes: Scopes, free_variables: Mapping[str, Any] | None = None
    ) -> None:
        """Add the edits of a fragment. ``free_variables``: values from the functions around it.

        Raises NoSource if something that it uses cannot be in a script.
        """
        source = fragment.module.source
        with self._contents.editing(fragment.module):
            for statement in scopes.local_imports:
                self._imports.check_local_import(fragment.module, statement)
            kept_nodes = self._edit_signatures(fragment, scopes)
            for assignment in scopes.local_annotations:
                fragment.edits += variable_annotation(source, assignment)
            for declaration in scopes.declarations:
                self._rename_declared(fragment, declaration)
            for free in scopes.free_names:
                if not free.in_signature or id(free.node) in kept_nodes:
                    self._rename(fragment, free, free_variables or {})

    def _edit_signatures(self, fragment: Fragment, scopes: Scopes) -> set[int]:
        """Take out annotations that cannot stay; return the ids of the nodes of those that do."""
        module = fragment.module
        kept_nodes: set[int] = set()
        for function in scopes.functions:
            for annotation, removal in signature_annotations(module.source, function):
                fragment.annotation_removals.append(removal)
                if module.is_own or not can_stay(module, annotation):
                    fragment.edits.append(removal)
                else:
                    kept_nodes |= set(map(id, ast.walk(annotation)))
        return kept_nodes

    def _rename_declared(self, fragment: Fragment, node: ast.Global | ast.Nonlocal) -> None:
        source = fragment.module.source
        if isinstance(node, ast.Nonlocal):
            return
        for name in node.names:
            output = self._definitions.definition(fragment.module, name)
            if output and output != name:
                text = re.sub(rf"\b{name}\b", output, source.text_of(node))
                fragment.edits.append(Edit(*source.span(node), text))

    def _rename(
        self, fragment: Fragment, free: FreeName, free_variables: Mapping[str, Any]
    ) -> None:
        source = fragment.module.source
        node: ast.expr = free.node
        output: str | None
        if free.name in free_variables:
            output = self._free_variable(fragment, free.name, free_variables[free.name])
        elif free.name == "__file__":
            output = repr(source.file)
            self._contents.files_using_their_path.add(source.file)
        else:
            node, output = self._resolve(fragment.module, free)
        if output is None or output == source.text_of(node):
            return
        if output in free.local_names and output.isidentifier():
            output = self._alias(free.name, output)
        fragment.edits.append(Edit(*source.span(node), output))

    def _free_variable(self, fragment: Fragment, name: str, value: Any) -> str:
        """The name in the script for a value from the functions around a local definition."""

        def choose() -> str:
            if callable(value):
                return self._definitions.named(value, name)
            return self._contents.add_constant(name, self._definitions.expression(value))

        return self._names.once((f"free variables of {id(fragment)}", name), choose)

    def _alias(self, name: str, output: str) -> str:
        """Another name for ``output``, for a place where a local variable has that name."""
        wanted = f"{name}_" if name == output else name
        return self._names.once(
            ("alias", output), lambda: self._contents.add_assignment(wanted, output)
        )

    def _resolve(self, module: SourceModule, free: FreeName) -> tuple[ast.expr, str | None]:
        """The node to replace, and its replacement; None for a builtin.

        An attribute of a sliced module becomes a name, and a field of a Case its value.
        """
        value = module.namespace.get(free.name)
        if self._definitions.is_replaced(module.name, free.name):
            return free.node, self._definitions.definition(module, free.name)
        if isinstance(value, Case) and free.attributes:
            node = free.attributes[0]
            return node, self._definitions.expression(getattr(value, node.attr), node.attr)
        for attribute in free.attributes:
            if not isinstance(value, ModuleType):
                break
            target = self._imports.sliceable(value)
            after = getattr(value, attribute.attr, None)
            if target is not None and not isinstance(after, ModuleType):
                return attribute, self._definitions.definition(target, attribute.attr)
            value = after
        return free.node, self._definitions.definition(module, free.name)
