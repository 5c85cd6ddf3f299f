"""The names of a script: imports, scopes, and values that are written as source."""

from __future__ import annotations

import ast
import functools
import math
import re
import sys
from collections.abc import Mapping
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.slicing.contents import (
    Contents,
    Definitions,
    Edit,
    Fragment,
    NoSource,
    Source,
    SourceModule,
    is_installed,
    is_own_module,
    local_definition,
    project_of,
    source_module,
    source_of,
)
from ddp_equivalence.report.script.slicing.import_statements import (
    FreeName,
    Function,
    Scopes,
    parameters,
)

# Decide for every import of a sliced module whether the script imports it too.


class ImportResolver:
    """The script imports installed modules, and contains definitions of the user's project and of
    this package.
    """

    def __init__(self, contents: Contents, definitions: Definitions) -> None:
        self._contents, self._names = contents, contents.names
        self._definitions = definitions
        self._projects: set[Path] = set()

    def add_project_of(self, file: str) -> None:
        """Definitions of all modules in the project of this file may be sliced from now on."""
        self._projects.add(project_of(file))

    def sliceable(self, module: ModuleType) -> SourceModule | None:
        """The source of a module whose definitions are sliced; None if the script imports it."""
        file = getattr(module, "__file__", None)
        if is_own_module(module.__name__):
            return source_module(module)
        if not isinstance(file, str) or is_installed(file):
            return None
        if not any(Path(file).resolve().is_relative_to(project) for project in self._projects):
            return None
        return source_module(module)

    def resolve(self, module: SourceModule, name: str, node: ast.Import | ast.ImportFrom) -> str:
        """Bring in a name that this statement imports; return its name in the script."""
        alias = next(a for a in node.names if (a.asname or a.name).split(".")[0] == name)
        if isinstance(node, ast.Import):
            return self.import_module(alias.name, name, plain=alias.asname is None)
        value = module.namespace.get(name)
        imported_from = _absolute_name(module, node)
        home = sys.modules.get(imported_from)
        target = self.sliceable(home) if home is not None else None
        if target is None:
            if isinstance(value, ModuleType):
                self._note_local_file(imported_from)
            return self.import_name(imported_from, alias.name, name)
        replaced = self._definitions.is_replaced(imported_from, alias.name)
        if alias.name in target.source.statements or replaced:
            return self._definitions.definition(target, alias.name) or name
        if isinstance(value, ModuleType) and not is_own_module(value.__name__):
            return self.import_name(imported_from, alias.name, name)
        return self._definitions.named(value, name)

    def import_module(self, module: str, name: str, plain: bool = False) -> str:
        """Import a module; ``plain``: without ``as``. Returns its name in the script.

        Raises NoSource for a module of this package.
        """
        if is_own_module(module):
            raise NoSource(f"it uses {module} as a whole")
        self._note_local_file(module)

        def choose() -> str:
            if plain:
                return self._names.reserve(module.split(".")[0])
            return self._names.free(name, module.replace(".", "_"))

        output = self._names.once((f"import {'' if plain else module}", name), choose)
        self._contents.imports.modules.add((module, output))
        return output

    def import_name(self, module: str, name: str, output: str) -> str:
        """Import a name from a module; ``output``: the name that it gets if it is free.

        Raises NoSource for a module of this package.
        """
        if is_own_module(module):
            raise NoSource(f"it uses {name} of {module}")
        self._note_local_file(module)
        last = module.rpartition(".")[2]

        def choose() -> str:
            chosen = self._names.free(output, f"{last}_{name}")
            self._contents.imports.names.setdefault(module, set()).add((name, chosen))
            return chosen

        return self._names.once((f"from {module} {name}", output), choose)

    def check_local_import(self, module: SourceModule, node: ast.Import | ast.ImportFrom) -> None:
        """Raise NoSource for an import inside a function that a script cannot have."""
        modules = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [_absolute_name(module, node)]
        for name in modules:
            if is_own_module(name) or (isinstance(node, ast.ImportFrom) and node.level):
                raise NoSource(f"it imports {name} inside a function")
            self._note_local_file(name)

    def _note_local_file(self, module: str) -> None:
        file = getattr(sys.modules.get(module.split(".")[0]), "__file__", None)
        if isinstance(file, str) and not is_installed(file):
            self._contents.local_files.add(file)


def _absolute_name(module: SourceModule, node: ast.ImportFrom) -> str:
    name = "." * node.level + (node.module or "")
    if not node.level:
        return name
    return resolve_name(name, module.namespace.get("__package__") or module.name)


# Edit a fragment so that its free names have the same values in the script.


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


# Take type annotations out of definitions that come into a script.


def signature_annotations(source: Source, function: Function) -> list[tuple[ast.expr, Edit]]:
    """Every annotation in a function's signature, with the edit that takes it out."""
    removals = []
    for parameter in parameters(function.args):
        if parameter.annotation is not None:
            start = source.span(parameter)[0] + len(parameter.arg.encode())
            end = source.span(parameter.annotation)[1]
            equals = re.match(rb" *= *|", source.bytes[end:])
            assert equals is not None
            # "x: int = 1" becomes "x=1".
            removal = Edit(start, end + equals.end(), equals[0].decode().strip())
            removals.append((parameter.annotation, removal))
    if function.returns is not None:
        start, end = source.span(function.returns)
        arrow = source.bytes.rindex(b"->", 0, start)
        removal = Edit(len(source.bytes[:arrow].rstrip()), end, "")
        removals.append((function.returns, removal))
    return removals


def variable_annotation(source: Source, assignment: ast.AnnAssign) -> list[Edit]:
    """The edits that make ``name: type = value`` a plain assignment."""
    if assignment.value is None:
        return []
    end = source.span(assignment.target)[1]
    return [Edit(end, source.span(assignment.annotation)[1], "")]


def can_stay(module: SourceModule, annotation: ast.expr) -> bool:
    """True if a script can evaluate this annotation of a user's function.

    It cannot if a name in the annotation is bound only for type checkers, or comes from this
    package. ``Rank`` may stay, because every script contains it.
    """
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            value = module.namespace.get(node.id)
            if value is Rank:
                continue
            home = getattr(value, "__module__", None) or ""
            from_package = isinstance(home, str) and is_own_module(home)
            if from_package or node.id in module.source.type_checking_names:
                return False
    return True


# Write plain values as Python source.


def literal(value: Any) -> str:
    """Source for a value: a number, text, a dtype, a device, or a container of these.

    Raises NoSource for anything else.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or value is ... or type(value) in (bool, int, float, complex, str, bytes):
        return "..." if value is ... else repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    if type(value) in (range, slice):
        return repr(value)
    if type(value) is tuple:
        items = ", ".join(map(literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    if type(value) is list:
        return f"[{', '.join(map(literal, value))}]"
    if type(value) in (set, frozenset):
        return f"{type(value).__name__}([{', '.join(sorted(map(literal, value)))}])"
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    raise NoSource(f"it uses a {type(value).__name__}, which cannot be written as source")


def indices_literal(indices: tuple[int, ...]) -> str:
    """``range(...)`` where the indices are evenly spaced, else the list of them."""
    if not indices:
        return "range(0)"
    step = indices[1] - indices[0] if len(indices) > 1 else 1
    if step > 0 and tuple(range(indices[0], indices[0] + step * len(indices), step)) == indices:
        bounds = f"{indices[0]}, {indices[-1] + 1}"
        return f"range({bounds})" if step == 1 else f"range({bounds}, {step})"
    return f"[{', '.join(map(str, indices))}]"


# Write a value as an expression of the script: a literal, or the name of its definition.


class ValueExpressions:
    """Brings the definitions that a value needs into the script."""

    def __init__(self, imports: ImportResolver, definitions: Definitions) -> None:
        self._imports = imports
        self._definitions = definitions

    def expression(self, value: Any, preferred: str = "") -> str:
        """An expression that has this value in the script. Raises NoSource if there is none."""
        if isinstance(value, functools.partial):
            parts = [self._definitions.named(value.func, preferred or "function")]
            parts += [self.expression(argument) for argument in value.args]
            parts += [f"{name}={self.expression(arg)}" for name, arg in value.keywords.items()]
            partial = self._imports.import_name("functools", "partial", "partial")
            return f"{partial}({', '.join(parts)})"
        if isinstance(value, ModuleType):
            return self._imports.import_module(value.__name__, preferred or value.__name__)
        if isinstance(value, MethodType):
            return f"{self.expression(value.__self__)}.{value.__name__}"
        if hasattr(value, "__qualname__") and isinstance(getattr(value, "__module__", None), str):
            return self._function_or_class(value, preferred)
        try:
            return literal(value)
        except NoSource:
            return self._global_variable(value)

    def _function_or_class(self, value: Any, preferred: str) -> str:
        if value.__module__ == "builtins":
            return str(value.__qualname__)
        module = sys.modules.get(value.__module__)
        first, *attributes = value.__qualname__.split(".")
        found: Any = getattr(module, first, None)
        for attribute in attributes:
            found = getattr(found, attribute, None)
        if module is not None and found is value:
            top_level = self._top_level_name(module, first, "" if attributes else preferred)
            return ".".join([top_level, *attributes])
        if isinstance(value, FunctionType):
            return self._local_function(value, preferred)
        if isinstance(value, type):
            return self._local_class(value, preferred)
        raise NoSource(f"{value.__qualname__} is not found in {value.__module__}")

    def _top_level_name(self, module: ModuleType, name: str, preferred: str) -> str:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not is_installed(file) and not is_own_module(module.__name__):
            # The user gave this function or class to the case, so its project is the user's.
            self._imports.add_project_of(file)
        sliced = self._imports.sliceable(module)
        if sliced is None:
            return self._imports.import_name(module.__name__, name, name)
        return self._definitions.definition(sliced, name, preferred) or name

    def _local_function(self, function: FunctionType, preferred: str) -> str:
        source = source_of(function.__code__.co_filename, function.__globals__)
        if source is None:
            raise NoSource(f"{function.__qualname__} has no source")
        module = SourceModule(function.__module__ or "", source, function.__globals__)
        local = local_definition(source, function)
        return self._definitions.local_definition(module, local, function, preferred)

    def _local_class(self, value: type, preferred: str) -> str:
        imported = sys.modules.get(value.__module__)
        module = source_module(imported) if imported is not None else None
        if module is None:
            raise NoSource(f"{value.__qualname__} has no source")
        local = local_definition(module.source, value)
        return self._definitions.local_definition(module, local, value, preferred)

    def _global_variable(self, value: Any) -> str:
        """The name of a variable at the top level of the value's module that holds the value."""
        imported = sys.modules.get(type(value).__module__)
        module = self._imports.sliceable(imported) if imported is not None else None
        if module is not None:
            for name, held in module.namespace.items():
                if held is value:
                    return self._definitions.definition(module, name) or name
        raise NoSource(f"it uses a {type(value).__name__} that no module holds under a name")
