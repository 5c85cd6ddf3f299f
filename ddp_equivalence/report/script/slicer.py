"""Take the definitions that a function needs out of their modules, transitively, by name."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import resolve_name
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ddp_equivalence.case.case import Case
from ddp_equivalence.ranks.rank import Rank
from ddp_equivalence.report.script.enclosed import Enclosed, enclosed
from ddp_equivalence.report.script.imports import Imports
from ddp_equivalence.report.script.literals import NoSource, literal
from ddp_equivalence.report.script.names import Found, Use, arguments, bound_by, find
from ddp_equivalence.report.script.origin import (
    Origin,
    is_installed,
    is_package,
    may_be_sliced,
    origin_of,
    project_of,
)
from ddp_equivalence.report.script.source import Edit, source_of

Redirect = Callable[[], str]
"""Gives the name that stands in the script for one of the package's own."""


@dataclass
class Piece:
    """A part of a module's text on its way into the script; ``edits`` rename what they must.

    ``types``: edits that take its annotations away, where the script cannot have them.
    """

    origin: Origin
    span: tuple[int, int]
    edits: list[Edit] = field(default_factory=list)
    types: list[Edit] = field(default_factory=list)
    finish: Callable[[str], str] = str


@dataclass
class Slicer:
    """``redirects``: (module, name) -> what is taken in its place.

    ``pieces`` by file and place, ``constants`` above them and ``glue`` below. ``follows``: file ->
    the files it takes names from. ``not_sliced``: files of modules that the script imports though
    they are not installed; ``reads_near``: those that ask for their own place. ``main``: the
    function that the script runs.
    """

    redirects: Mapping[tuple[str, str], Redirect] = field(default_factory=dict)
    imports: Imports = field(default_factory=Imports)
    constants: dict[str, str] = field(default_factory=dict)
    glue: dict[str, str] = field(default_factory=dict)
    pieces: dict[tuple[str, int], Piece] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    follows: dict[str, set[str]] = field(default_factory=dict)
    not_sliced: set[str] = field(default_factory=set)
    reads_near: set[str] = field(default_factory=set)
    main: str = ""
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)
    _within: list[str] = field(default_factory=list)
    _projects: set[Path] = field(default_factory=set)

    def constant(self, name: str, text: str) -> str:
        """A constant of the script; its name there."""
        return self._once(("constants", name), lambda: self._constant(name, text))

    def named(self, value: Any, preferred: str) -> str:
        """A name, or dotted name, in the script for a function, class or constant.

        Raises NoSource if it cannot be written as source.
        """
        text = self.expression(value, preferred)
        if all(part.isidentifier() for part in text.split(".")):
            return text
        return self.glued(preferred, text)

    def glued(self, name: str, text: str) -> str:
        """A name that is bound once all definitions of the user and the catalogue are there."""
        return self._once(("glue", text), lambda: self._glue(name, text))

    def expression(self, value: Any, preferred: str = "") -> str:
        """Source whose value in the script is this one. Raises NoSource if there is none."""
        if isinstance(value, functools.partial):
            parts = [self.named(value.func, preferred or "function")]
            parts += [self.expression(one) for one in value.args]
            parts += [f"{name}={self.expression(one)}" for name, one in value.keywords.items()]
            return f"{self._import_name('functools', 'partial', 'partial')}({', '.join(parts)})"
        if isinstance(value, ModuleType):
            return self._import_module(value.__name__, preferred or value.__name__)
        if isinstance(value, MethodType):
            return f"{self.expression(value.__self__)}.{value.__name__}"
        if hasattr(value, "__qualname__") and isinstance(getattr(value, "__module__", None), str):
            return self._defined(value, preferred)
        try:
            return literal(value)
        except NoSource:
            return self._global_holding(value)

    def need(self, origin: Origin, name: str, preferred: str = "") -> str | None:
        """The name in the script of a name of a module; None for a builtin."""
        redirect = self.redirects.get((origin.module, name))
        if redirect is not None:
            return redirect()
        self._follows(origin)
        key = origin.source.file, name
        if key in self._names:
            return self._names[key]
        statements = origin.source.statements.get(name, [])
        if not statements:
            if name not in origin.namespace or name.startswith("__"):
                return None
            return self._once(key, lambda: self.named(origin.namespace[name], preferred or name))
        last = statements[-1]
        if isinstance(last, ast.Import | ast.ImportFrom):
            return self._once(key, lambda: self._imported(origin, name, last))
        if isinstance(origin.namespace.get(name), Case):
            raise NoSource(f"{name} is a Case, of which only fields can be used")
        if origin.of_package and not may_be_sliced(origin.module):
            raise NoSource(f"{name} of {origin.module} has no place in a plain script")
        self._enter(origin)
        for bound in sorted({one for statement in statements for one in bound_by(statement)}):
            self._allocate_for(origin, bound, preferred if bound == name else "")
        for statement in statements:
            self._add(origin, statement)
        return self._names[key]

    def _once(self, key: tuple[str, str], make: Callable[[], str]) -> str:
        if key not in self._names:
            self._names[key] = make()
        return self._names[key]

    def _constant(self, name: str, text: str) -> str:
        output = self._free(name, f"THE_{name}")
        self.constants[output] = text
        return output

    def _glue(self, name: str, text: str) -> str:
        output = self._free(name, f"the_{name}")
        self.glue[output] = text
        return output

    def _free(self, *wanted: str) -> str:
        """The first of the names that is nobody's yet."""
        taken = {*self._taken, *keyword.kwlist}
        numbered = (f"{wanted[-1]}_{number}" for number in range(2, 1000))
        name = next(one for one in (*wanted, *numbered) if one not in taken)
        self._taken.add(name)
        return name

    def _allocate_for(self, origin: Origin, name: str, preferred: str) -> None:
        # A user's functions keep their own names.
        wanted = [preferred] if preferred and origin.of_package else []
        if not (origin.of_package and hasattr(builtins, name)):
            wanted.append(name)
        plain = name.strip("_")
        self._once(
            (origin.source.file, name), lambda: self._free(*wanted, f"{origin.stem}_{plain}")
        )

    def _enter(self, origin: Origin) -> None:
        """Meet a module for the first time: what it sets in torch at its import belongs to it."""
        file = origin.source.file
        if file in self.origins:
            return
        self.origins[file] = origin
        if origin.of_package:
            return
        self._projects.add(project_of(file))
        for statement in origin.source.tree.body:
            if _sets_something_in_torch(statement):
                self._add(origin, statement)

    def _add(self, origin: Origin, statement: ast.stmt) -> None:
        start, end = origin.source.whole_lines(statement)
        key = origin.source.file, start
        if key in self.pieces:
            return
        piece = self.pieces[key] = Piece(origin, (start, end))
        self._edit(piece, find(statement), Enclosed())
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._rename_definition(piece, statement)
        if isinstance(statement, ast.AnnAssign) and origin.of_package:
            piece.edits += origin.source.without_type(statement)

    def _rename_definition(
        self, piece: Piece, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> None:
        output = self._names[piece.origin.source.file, node.name]
        if output != node.name:
            source = piece.origin.source
            start = source.bytes.index(node.name.encode(), source.span(node)[0] + len("def"))
            piece.edits.append(Edit(start, start + len(node.name.encode()), output))

    def _edit(self, piece: Piece, found: Found, around: Enclosed) -> None:
        """Follow every use in a piece, and rename where the script has another name."""
        self._within.append(piece.origin.source.file)
        try:
            self._edit_within(piece, found, around)
        finally:
            self._within.pop()

    def _edit_within(self, piece: Piece, found: Found, around: Enclosed) -> None:
        source = piece.origin.source
        for inside in found.imports:
            self._check_import_inside(piece.origin, inside)
        kept: set[int] = set()
        for function in found.signatures:
            piece.types += source.without_annotations(function)
            for one in [*arguments(function.args), function]:
                annotation = one.annotation if isinstance(one, ast.arg) else one.returns
                if annotation is None:
                    continue
                if piece.origin.of_package or not self._can_stand(piece.origin, annotation):
                    piece.edits += [
                        edit
                        for edit in source.without_annotations(function)
                        if edit.end == source.span(annotation)[1]
                    ]
                else:
                    kept |= set(map(id, ast.walk(annotation)))
        for assignment in found.local_types:
            piece.edits += source.without_type(assignment)
        for declared in found.declared:
            self._rename_declared(piece, declared)
        for use in found.uses:
            if not use.annotation or id(use.node) in kept:
                self._follow(piece, use, around)

    def _can_stand(self, origin: Origin, annotation: ast.expr) -> bool:
        """Can an annotation of a user's function stay?"""
        for one in ast.walk(annotation):
            if isinstance(one, ast.Name):
                value = origin.namespace.get(one.id)
                if one.id in origin.source.type_only and value is not Rank:
                    return False
                home = getattr(value, "__module__", None) or ""
                if value is not Rank and isinstance(home, str) and is_package(home):
                    return False
        return True

    def _rename_declared(self, piece: Piece, node: ast.Global | ast.Nonlocal) -> None:
        source = piece.origin.source
        for name in node.names:
            output = self.need(piece.origin, name) if isinstance(node, ast.Global) else name
            if output and output != name:
                text = re.sub(rf"\b{name}\b", output, source.part(node))
                piece.edits.append(Edit(*source.span(node), text))

    def _check_import_inside(self, origin: Origin, node: ast.Import | ast.ImportFrom) -> None:
        modules = [one.name for one in node.names]
        if isinstance(node, ast.ImportFrom):
            modules = [_absolute(origin, node)]
        for module in modules:
            if is_package(module) or (isinstance(node, ast.ImportFrom) and node.level):
                raise NoSource(f"it imports {module} inside of a function")
            self._remember_if_local(module)

    def _follow(self, piece: Piece, use: Use, around: Enclosed) -> None:
        origin, source = piece.origin, piece.origin.source
        node: ast.expr = use.node
        if use.name in around.values:
            output: str | None = self._once(
                (f"{source.file} {id(around)}", use.name),
                lambda: (
                    self.named(around.values[use.name], use.name)
                    if callable(around.values[use.name])
                    else self._glue_early(use.name, self.expression(around.values[use.name]))
                ),
            )
        elif use.name == "__file__":
            output = repr(source.file)
            self.reads_near.add(source.file)
        else:
            node, output = self._resolved(origin, use)
        if output is None or output == source.part(node):
            return
        if output in use.hidden and output.isidentifier():
            output = self._once(("alias", output), lambda: self._alias(use.name, str(output)))
        piece.edits.append(Edit(*source.span(node), output))

    def _alias(self, name: str, output: str) -> str:
        return self._glue(f"{name}_" if name == output else name, output)

    def _glue_early(self, name: str, text: str) -> str:
        return self._constant(name, text)

    def _resolved(self, origin: Origin, use: Use) -> tuple[ast.expr, str | None]:
        """The node that is replaced, and by what; attributes of sliced modules are names."""
        value = origin.namespace.get(use.name)
        if (origin.module, use.name) in self.redirects:
            return use.node, self.need(origin, use.name)
        if isinstance(value, Case) and use.attributes:
            field_ = use.attributes[0]
            return field_, self.expression(getattr(value, field_.attr), field_.attr)
        for attribute in use.attributes:
            if not isinstance(value, ModuleType):
                break
            target = self._sliceable(value)
            after = getattr(value, attribute.attr, None)
            if target is not None and not isinstance(after, ModuleType):
                return attribute, self.need(target, attribute.attr)
            value = after
        return use.node, self.need(origin, use.name)

    def _follows(self, target: Origin) -> None:
        """What is being sliced now takes a name from there."""
        if self._within:
            self.follows.setdefault(self._within[-1], set()).add(target.source.file)

    def _sliceable(self, module: ModuleType) -> Origin | None:
        """The origin of a module whose definitions are sliced; None where it is imported."""
        file = getattr(module, "__file__", None)
        if is_package(module.__name__):
            return origin_of(module)
        if not isinstance(file, str) or is_installed(file):
            return None
        if not any(Path(file).resolve().is_relative_to(one) for one in self._projects):
            return None
        return origin_of(module)

    def _imported(self, origin: Origin, name: str, node: ast.Import | ast.ImportFrom) -> str:
        alias = next(a for a in node.names if (a.asname or a.name).split(".")[0] == name)
        value = origin.namespace.get(name)
        if isinstance(node, ast.Import):
            if is_package(alias.name):
                raise NoSource(f"it uses {alias.name} as a whole")
            return self._import_module(alias.name, name, plain=alias.asname is None)
        module = _absolute(origin, node)
        home = sys.modules.get(module)
        target = self._sliceable(home) if home is not None else None
        if target is None:
            if isinstance(value, ModuleType):
                self._remember_if_local(module)
            return self._import_name(module, alias.name, name)
        if alias.name in target.source.statements or (module, alias.name) in self.redirects:
            return self.need(target, alias.name, preferred="") or name
        if isinstance(value, ModuleType) and not is_package(value.__name__):
            return self._import_name(module, alias.name, name)
        return self.named(value, name)

    def _import_module(self, module: str, name: str, plain: bool = False) -> str:
        if is_package(module):
            raise NoSource(f"it uses {module} as a whole")
        self._remember_if_local(module)

        def add() -> str:
            root = module.split(".")[0]
            output = root if plain else self._free(name, f"{module.replace('.', '_')}")
            self._taken.add(output)
            return output

        output = self._once((f"import {'' if plain else module}", name), add)
        self.imports.modules.add((module, output))
        return output

    def _import_name(self, module: str, name: str, output: str) -> str:
        if is_package(module):
            raise NoSource(f"it uses {name} of {module}")
        self._remember_if_local(module)
        prefix = module.rpartition(".")[2]

        def add() -> str:
            given = self._free(output, f"{prefix}_{name}")
            self.imports.names.setdefault(module, set()).add((name, given))
            return given

        return self._once((f"from {module} {name}", output), add)

    def _remember_if_local(self, module: str) -> None:
        file = getattr(sys.modules.get(module.split(".")[0]), "__file__", None)
        if isinstance(file, str) and not is_installed(file):
            self.not_sliced.add(file)

    def _defined(self, value: Any, preferred: str) -> str:
        module, parts = sys.modules.get(value.__module__), value.__qualname__.split(".")
        if value.__module__ == "builtins":
            return str(value.__qualname__)
        found: Any = module
        for part in parts:
            found = getattr(found, part, None)
        if module is not None and found is value:
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not is_installed(file) and not is_package(module.__name__):
                # Asked for by name, it is the user's own, wherever it is.
                self._projects.add(project_of(file))
            origin = self._sliceable(module)
            if origin is None:
                first = self._import_name(module.__name__, parts[0], parts[0])
            else:
                first = (
                    self.need(origin, parts[0], preferred if len(parts) == 1 else "") or parts[0]
                )
            return ".".join([first, *parts[1:]])
        if isinstance(value, FunctionType):
            return self._enclosed_function(value, preferred)
        if isinstance(value, type):
            return self._enclosed_class(value, preferred)
        raise NoSource(f"{value.__qualname__} is not found in {value.__module__}")

    def _enclosed_function(self, function: FunctionType, preferred: str) -> str:
        source = source_of(function.__code__.co_filename, function.__globals__)
        if source is None:
            raise NoSource(f"{function.__qualname__} has no source")
        origin = Origin(function.__module__ or "", source, function.__globals__)
        return self._enclosed(origin, enclosed(source, function), preferred, function)

    def _enclosed_class(self, value: type, preferred: str) -> str:
        module = sys.modules.get(value.__module__)
        origin = origin_of(module) if module is not None else None
        if origin is None:
            raise NoSource(f"{value.__qualname__} has no source")
        return self._enclosed(origin, enclosed(origin.source, value), preferred, value)

    def _enclosed(self, origin: Origin, around: Enclosed, preferred: str, value: object) -> str:
        self._follows(origin)
        self._enter(origin)
        node = around.node
        assert node is not None
        key = f"{origin.source.file} {id(value)}", ""
        if key in self._names:
            return self._names[key]
        own = getattr(node, "name", "")
        wanted = [one for one in (own, preferred) if one]
        output = self._once(key, lambda: self._free(*wanted, f"{origin.stem}_{wanted[-1]}"))
        start, end = around.span(origin.source)
        piece = Piece(origin, (start, end), finish=lambda text: around.as_definition(text, output))
        found = find(node, skip=[one for one, _ in around.defaults])
        unknown = around.unknown(found, origin)
        if unknown:
            raise NoSource(f"{own or 'the lambda'} uses {unknown} of the function around it")
        for default, kept in around.defaults:
            piece.edits.append(Edit(*origin.source.span(default), self.expression(kept)))
        self._edit(piece, found, around)
        self.pieces[f"{origin.source.file}", start + len(self.pieces) * 10**9] = piece
        return output

    def _global_holding(self, value: Any) -> str:
        """A value that some module holds under a name: an instance, a torch operator."""
        module = sys.modules.get(type(value).__module__)
        origin = self._sliceable(module) if module is not None else None
        for name, held in vars(module).items() if origin is not None else ():
            if held is value and origin is not None:
                return self.need(origin, name) or name
        raise NoSource(f"a {type(value).__name__} that no module holds under a name")


def _absolute(origin: Origin, node: ast.ImportFrom) -> str:
    name = "." * node.level + (node.module or "")
    if not node.level:
        return name
    return resolve_name(name, origin.namespace.get("__package__") or origin.module)


def _sets_something_in_torch(statement: ast.stmt) -> bool:
    """``torch.set_...(...)``, or an assignment to ``torch.backends...``."""
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
