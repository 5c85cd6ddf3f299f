"""The slicer brings a definition into the script, and with it every definition that it uses."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping
from typing import Any

from ddp_equivalence.case.case import Case
from ddp_equivalence.report.script.slicing.contents import (
    Contents,
    Edit,
    Fragment,
    LocalDefinition,
    NoSource,
    SourceModule,
    may_be_sliced,
)
from ddp_equivalence.report.script.slicing.import_statements import bound_names, scopes_of
from ddp_equivalence.report.script.slicing.names import (
    ImportResolver,
    NameEdits,
    ValueExpressions,
    variable_annotation,
)

Replacement = Callable[[], str]
"""Brings something else into the script instead of a definition, and returns its name there."""


class Slicer:
    """``replacements``: the replacement of a definition, by its module and name.

    ``contents`` is the script as far as it has been collected.
    """

    def __init__(self, replacements: Mapping[tuple[str, str], Replacement]) -> None:
        self.contents = Contents()
        self._replacements = replacements
        self._names = self.contents.names
        self._imports = ImportResolver(self.contents, self)
        self._name_edits = NameEdits(self.contents, self._imports, self)
        self._values = ValueExpressions(self._imports, self)

    def constant(self, name: str, expression: str) -> str:
        """Bind a constant at the top of the script, once; return its name there."""
        return self._names.once(
            ("constants", name), lambda: self.contents.add_constant(name, expression)
        )

    def assignment(self, name: str, expression: str) -> str:
        """Bind a name below all definitions of user and catalogue, once; return its name there."""
        return self._names.once(
            ("assignments", expression), lambda: self.contents.add_assignment(name, expression)
        )

    def named(self, value: Any, preferred: str) -> str:
        """A name, or a dotted name, that has this value in the script. Raises NoSource."""
        text = self.expression(value, preferred)
        if all(part.isidentifier() for part in text.split(".")):
            return text
        return self.assignment(preferred, text)

    def expression(self, value: Any, preferred: str = "") -> str:
        """An expression that has this value in the script. Raises NoSource if there is none."""
        return self._values.expression(value, preferred)

    def is_replaced(self, module: str, name: str) -> bool:
        """True if the script contains something else instead of this name."""
        return (module, name) in self._replacements

    def definition(self, module: SourceModule, name: str, preferred: str = "") -> str | None:
        """Bring in the definition of a module's name; return its name in the script.

        None for a builtin. ``preferred``: the name that it gets if that is free. Raises NoSource.
        """
        if self.is_replaced(module.name, name):
            return self._replacements[module.name, name]()
        self.contents.add_dependency_on(module)
        key = module.source.file, name
        if key in self._names:
            return self._names[key]
        statements = module.source.statements.get(name, [])
        if not statements:
            if name not in module.namespace or name.startswith("__"):
                return None
            value = module.namespace[name]
            return self._names.once(key, lambda: self.named(value, preferred or name))
        last = statements[-1]
        if isinstance(last, ast.Import | ast.ImportFrom):
            return self._names.once(key, lambda: self._imports.resolve(module, name, last))
        if isinstance(module.namespace.get(name), Case):
            raise NoSource(f"{name} is a Case, and only its fields can be used")
        if module.is_own and not may_be_sliced(module.name):
            raise NoSource(f"{name} of {module.name} has no place in a plain script")
        self._enter(module)
        for bound in sorted({each for statement in statements for each in bound_names(statement)}):
            self._choose_name(module, bound, preferred if bound == name else "")
        for statement in statements:
            self._add_statement(module, statement)
        return self._names[key]

    def local_definition(
        self, module: SourceModule, local: LocalDefinition, value: object, preferred: str
    ) -> str:
        """Bring in a lambda, or what a function defined; return its name in the script."""
        self.contents.add_dependency_on(module)
        self._enter(module)
        file = module.source.file
        key = f"{file} {id(value)}", ""
        if key in self._names:
            return self._names[key]
        wanted = [name for name in (local.name, preferred) if name]
        output = self._names.once(
            key, lambda: self._names.free(*wanted, f"{module.stem}_{wanted[-1]}")
        )
        span = local.span(module.source)
        fragment = Fragment(module, span, finish=lambda text: local.at_top_level(text, output))
        scopes = scopes_of(local.node, skip=[node for node, _ in local.defaults])
        local.check_names(scopes, module)
        for node, default in local.defaults:
            fragment.edits.append(Edit(*module.source.span(node), self.expression(default)))
        self._name_edits.edit(fragment, scopes, local.free_variables)
        # It stands after the statements of its module, and after the local definitions it uses.
        self.contents.fragments[file, 1 + len(self.contents.fragments), span[0]] = fragment
        return output

    def _choose_name(self, module: SourceModule, name: str, preferred: str) -> None:
        # A user's functions keep their own names.
        wanted = [preferred] if preferred and module.is_own else []
        if not (module.is_own and hasattr(builtins, name)):
            wanted.append(name)
        last_resort = f"{module.stem}_{name.strip('_')}"
        self._names.once((module.source.file, name), lambda: self._names.free(*wanted, last_resort))

    def _enter(self, module: SourceModule) -> None:
        """Add a module at its first definition, with its statements that set something in torch."""
        file = module.source.file
        if file in self.contents.modules:
            return
        self.contents.modules[file] = module
        if module.is_own:
            return
        self._imports.add_project_of(file)
        for statement in module.source.tree.body:
            if _changes_torch(statement):
                self._add_statement(module, statement)

    def _add_statement(self, module: SourceModule, statement: ast.stmt) -> None:
        span = module.source.statement_span(statement)
        key = module.source.file, 0, span[0]
        if key in self.contents.fragments:
            return
        fragment = self.contents.fragments[key] = Fragment(module, span)
        self._name_edits.edit(fragment, scopes_of(statement))
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._rename_definition(fragment, statement)
        if isinstance(statement, ast.AnnAssign) and module.is_own:
            fragment.edits += variable_annotation(module.source, statement)

    def _rename_definition(
        self, fragment: Fragment, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> None:
        source = fragment.module.source
        output = self._names[source.file, node.name]
        if output != node.name:
            start = source.bytes.index(node.name.encode(), source.span(node)[0] + len("def"))
            fragment.edits.append(Edit(start, start + len(node.name.encode()), output))


def _changes_torch(statement: ast.stmt) -> bool:
    """True for ``torch.set_...(...)``, and for an assignment to ``torch.backends...``."""
    target: ast.AST | None = None
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        target = statement.value.func
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    if not isinstance(target, ast.Attribute):
        return False
    while isinstance(target, ast.Attribute):
        target = target.value
    return isinstance(target, ast.Name) and target.id == "torch"
