"""What a script contains, collected by the slicer and written down by ``render``."""

from __future__ import annotations

import ast
import builtins
import linecache
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from ddp_equivalence.report.script.slicing.import_statements import (
    ImportStatements,
    OutputNames,
    Scopes,
    bound_names,
)


@dataclass
class Fragment:
    """A part of a module's text that goes into the script.

    ``span``: its bytes in the file. ``edits``: the changes to its text, most of them new names.
    ``annotation_removals``: edits for a script that cannot have the fragment's annotations.
    ``finish`` is applied to the edited text.
    """

    module: SourceModule
    span: tuple[int, int]
    edits: list[Edit] = field(default_factory=list)
    annotation_removals: list[Edit] = field(default_factory=list)
    finish: Callable[[str], str] = str


@dataclass
class Contents:
    """The parts of a script, from its imports to its last line.

    ``constants`` stand above all definitions, ``assignments`` below those of the user and of the
    catalogue. ``fragments``: by file, order in the script (0 for statements at the top level of the
    file, more for local definitions), and position in the file. ``modules``: the modules of the
    fragments, by file. ``dependencies``: file -> the files that it takes names from.
    ``local_files``: files that the script imports though they are not installed.
    ``files_using_their_path``: files whose code reads ``__file__``. ``main``: the function that
    the script calls.
    """

    names: OutputNames = field(default_factory=OutputNames)
    imports: ImportStatements = field(default_factory=ImportStatements)
    constants: dict[str, str] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    fragments: dict[tuple[str, int, int], Fragment] = field(default_factory=dict)
    modules: dict[str, SourceModule] = field(default_factory=dict)
    dependencies: dict[str, set[str]] = field(default_factory=dict)
    local_files: set[str] = field(default_factory=set)
    files_using_their_path: set[str] = field(default_factory=set)
    main: str = ""
    _files_being_edited: list[str] = field(default_factory=list)

    def add_constant(self, name: str, expression: str) -> str:
        """Bind a name above all definitions; return the name that it gets in the script."""
        output = self.names.free(name, f"THE_{name}")
        self.constants[output] = expression
        return output

    def add_assignment(self, name: str, expression: str) -> str:
        """Bind a name below the definitions that it uses; return the name that it gets."""
        output = self.names.free(name, f"the_{name}")
        self.assignments[output] = expression
        return output

    @contextmanager
    def editing(self, module: SourceModule) -> Iterator[None]:
        """In this block, ``add_dependency_on`` adds dependencies of this module."""
        self._files_being_edited.append(module.source.file)
        try:
            yield
        finally:
            self._files_being_edited.pop()

    def add_dependency_on(self, module: SourceModule) -> None:
        """Record that the module which is being edited takes a name from this module."""
        if self._files_being_edited:
            user = self._files_being_edited[-1]
            self.dependencies.setdefault(user, set()).add(module.source.file)


# The methods of the slicer that its own parts call.


class Definitions(Protocol):
    """Brings definitions and values into the script, and returns their names there."""

    def definition(self, module: SourceModule, name: str, preferred: str = "") -> str | None:
        """Bring in the definition of a module's name; return its name in the script.

        None for a builtin. ``preferred``: the name that it gets if that is free. Raises NoSource.
        """

    def local_definition(
        self, module: SourceModule, local: LocalDefinition, value: object, preferred: str
    ) -> str:
        """Bring in a lambda, or what a function defined; return its name in the script."""

    def expression(self, value: Any, preferred: str = "") -> str:
        """An expression that has this value in the script. Raises NoSource if there is none."""

    def named(self, value: Any, preferred: str) -> str:
        """A name, or a dotted name, that has this value in the script. Raises NoSource."""

    def is_replaced(self, module: str, name: str) -> bool:
        """True if the script contains something else instead of this name."""


# Find the source of lambdas, and of functions and classes that are defined in a function.
#
# A script defines them at its top level, so it needs the values of their free variables.

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True)
class LocalDefinition:
    """``free_variables``: the values that the definition takes from the functions around it.

    ``defaults``: its default arguments with their values, which were computed in those functions.
    """

    node: Node
    free_variables: dict[str, Any]
    defaults: tuple[tuple[ast.expr, Any], ...] = field(default=())

    @property
    def name(self) -> str:
        """Its own name; empty for a lambda."""
        return getattr(self.node, "name", "")

    def span(self, source: Source) -> tuple[int, int]:
        """The start and end of its text: whole lines; a lambda from its parameters on."""
        start, end = source.span(self.node)
        if isinstance(self.node, ast.Lambda):
            return start + len("lambda"), end
        decorators = [decorator.lineno for decorator in self.node.decorator_list]
        return source.position(min([self.node.lineno, *decorators]), 0), end

    def at_top_level(self, text: str, output: str) -> str:
        """Its text as a definition at the top level of a script, under the name ``output``."""
        if isinstance(self.node, ast.Lambda):
            return _lambda_as_function(text, output)
        lines = text.splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        lines = [line[indent:] if not line[:indent].strip() else line for line in lines]
        for number, line in enumerate(lines):
            if line.startswith(("def ", "async def ", "class ")):
                lines[number] = line.replace(f" {self.name}", f" {output}", 1)
                break
        return "\n".join(lines)

    def check_names(self, scopes: Scopes, module: SourceModule) -> None:
        """Raise NoSource if it uses a name whose value is not known.

        Python keeps the values that a function takes from the functions around it, but not those
        that the body of a class takes.
        """
        for free in scopes.free_names:
            known = free.name in self.free_variables or free.name in module.namespace
            if not known and not hasattr(builtins, free.name) and not free.in_signature:
                subject = self.name or "the lambda"
                raise NoSource(f"{subject} uses {free.name} of the function around it")


def local_definition(source: Source, value: FunctionType | type) -> LocalDefinition:
    """Find the definition of a function or class in its file.

    Raises NoSource if it is no longer there, or if it needs more from outside than values.
    """
    if isinstance(value, type):
        return LocalDefinition(_class_node(source, value), _free_variables_of_class(value))
    node = _function_node(source, value)
    free_variables = {}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            free_variables[name] = cell.cell_contents
        except ValueError:
            raise NoSource(f"{name} has no value yet") from None
    for part in ast.walk(node):
        if isinstance(part, ast.Nonlocal) and set(part.names) & free_variables.keys():
            raise NoSource(f"it sets {', '.join(part.names)} of the function around it")
    return LocalDefinition(node, free_variables, _defaults(node, value))


def _function_node(source: Source, value: FunctionType) -> ast.FunctionDef | ast.Lambda:
    code = value.__code__
    is_lambda = value.__name__ == "<lambda>"
    candidates: list[Any] = []
    for node in ast.walk(source.tree):
        if is_lambda and isinstance(node, ast.Lambda) and _is_lambda_of(node, code):
            candidates.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            decorators = [decorator.lineno for decorator in node.decorator_list]
            if min([node.lineno, *decorators]) == code.co_firstlineno:
                candidates.append(node)
    if not candidates:
        raise NoSource(f"{value.__qualname__} is not in {source.file} any more")
    innermost: ast.FunctionDef | ast.Lambda = min(
        candidates, key=lambda node: node.end_lineno - node.lineno
    )
    return innermost


def _is_lambda_of(node: ast.Lambda, code: CodeType) -> bool:
    """True if this code was compiled from this lambda; there may be several in a line."""
    if node.lineno != code.co_firstlineno:
        return False
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    instructions = [
        ((line, column), (end_line, end_column))
        for line, end_line, column, end_column in code.co_positions()
        if None not in (line, end_line, column, end_column) and (column, end_column) != (0, 0)
    ]
    inner_lambdas = [inner for inner in ast.walk(node.body) if isinstance(inner, ast.Lambda)]
    if any(_is_lambda_of(inner, code) for inner in inner_lambdas):
        return False
    return all(start <= first and last <= end for first, last in instructions)


def _class_node(source: Source, value: type) -> ast.ClassDef:
    name = value.__qualname__.rpartition(".")[2]
    nodes = [n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name == name]
    if len(nodes) != 1:
        raise NoSource(f"there are {len(nodes)} classes {name} in {source.file}")
    return nodes[0]


def _free_variables_of_class(value: type) -> dict[str, Any]:
    """The values that the methods of a class take from the functions around the class."""
    values: dict[str, Any] = {}
    for method in vars(value).values():
        if isinstance(method, FunctionType):
            cells = zip(method.__code__.co_freevars, method.__closure__ or (), strict=True)
            values |= {name: cell.cell_contents for name, cell in cells if name != "__class__"}
    return values


def _defaults(node: Any, value: FunctionType) -> tuple[tuple[ast.expr, Any], ...]:
    arguments = node.args
    pairs = list(zip(arguments.defaults, value.__defaults__ or (), strict=True))
    keyword_values = value.__kwdefaults__ or {}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None:
            pairs.append((default, keyword_values[argument.arg]))
    return tuple(pairs)


def _lambda_as_function(text: str, output: str) -> str:
    """A function of that name from the text of a lambda after its first word: ``" x: x + 1"``."""
    whole = f"(lambda{text}\n)"
    node = ast.parse(whole, mode="eval").body
    assert isinstance(node, ast.Lambda)
    source = Source("", whole)
    # There may be an opening bracket between the colon and the body.
    head = source.bytes[: source.span(node.body)[0]].decode()
    first, *more = whole[head.rindex(":") + 1 : -1].strip().splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in more if line.strip()), default=0)
    body = "\n".join([first, *(f"    {line[indent:]}" for line in more)])
    if more and first[0] not in "([{":
        body = f"({body}\n    )"
    return f"def {output}({ast.unparse(node.args)}):\n    return {body}"


# The error for everything that a script cannot contain.


class NoSource(ValueError):
    """A value or name that cannot be written as source; the message says which and why."""


# A module that definitions are taken from.


@dataclass(frozen=True)
class SourceModule:
    """The source of a module, and the values of the module's names now."""

    name: str
    source: Source
    namespace: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """True for a module of this package."""
        return is_own_module(self.name)

    @property
    def stem(self) -> str:
        """A short name for the module that can be part of an identifier."""
        path = Path(self.source.file)
        stem = path.parent.name if path.stem == "__init__" else path.stem
        return stem if stem.isidentifier() else "cell"


def source_module(imported: ModuleType) -> SourceModule | None:
    """The source and names of an imported module; None if it has no Python source."""
    file = getattr(imported, "__file__", None)
    source = source_of(file, vars(imported)) if isinstance(file, str) else None
    return SourceModule(imported.__name__, source, vars(imported)) if source else None


# Which modules a script may take definitions from; it imports all others.

PACKAGE = "ddp_equivalence"
TEMPLATE = f"{PACKAGE}.report.script.template"

SLICEABLE = (
    *("case.models", "case.losses", "case.build", "case.batch", "case.batch_tree"),
    *("case.random_state", "case.training", "strategies", "faults", "comparison.comparison"),
    *("comparison.gradients", "ranks.rank", "report.script.template"),
)
"""The modules and folders of this package whose definitions a plain script may contain."""

PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "pytest.ini", "tox.ini", ".git")

_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def is_own_module(module: str) -> bool:
    """True for a module of this package."""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def may_be_sliced(own_module: str) -> bool:
    """True if a plain script may contain definitions of this module of the package."""
    name = own_module.removeprefix(f"{PACKAGE}.")
    return any(name == entry or name.startswith(f"{entry}.") for entry in SLICEABLE)


def is_installed(file: str) -> bool:
    """True if the file belongs to Python or to an installed distribution."""
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    return any(path.is_relative_to(folder) for folder in _INSTALLED)


def project_of(file: str) -> Path:
    """The folder of the project that a file belongs to; the file's own folder if it is in none."""
    folder = Path(file).resolve().parent
    for candidate in (folder, *folder.parents):
        if any((candidate / name).exists() for name in PROJECT_FILES):
            return candidate
    return folder


# The text of a module, its statements by the names they bind, and edits of that text.


@dataclass(frozen=True)
class Edit:
    """Replaces the bytes from ``start`` to ``end`` of a text by ``text``."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Source:
    """The text of one file, or of one cell of a notebook. All positions in it are bytes from 0."""

    file: str
    text: str

    @cached_property
    def bytes(self) -> bytes:
        return self.text.encode()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def statements(self) -> dict[str, list[ast.stmt]]:
        """Name -> the statements at the top level that bind it."""
        by_name: dict[str, list[ast.stmt]] = {}
        for statement in self.tree.body:
            if not _is_type_checking(statement):
                for name in bound_names(statement):
                    by_name.setdefault(name, []).append(statement)
        return by_name

    @cached_property
    def type_checking_names(self) -> set[str]:
        """The names that are bound under ``if TYPE_CHECKING`` only."""
        blocks = [statement for statement in self.tree.body if _is_type_checking(statement)]
        return {name for block in blocks for name in bound_names(block)} - self.statements.keys()

    @cached_property
    def postpones_annotations(self) -> bool:
        """True if the module begins with ``from __future__ import annotations``."""
        return any(
            isinstance(statement, ast.ImportFrom)
            and statement.module == "__future__"
            and any(alias.name == "annotations" for alias in statement.names)
            for statement in self.tree.body
        )

    def position(self, line: int, column: int) -> int:
        """The position for a line (from 1) and a column (in bytes from 0), as ast counts them."""
        return self._line_starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        """The start and the end of a node."""
        return (
            self.position(node.lineno, node.col_offset),
            self.position(node.end_lineno, node.end_col_offset),
        )

    def text_of(self, node: Any) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def statement_span(self, node: ast.stmt) -> tuple[int, int]:
        """The lines of a statement, with its decorators, the comment above and a docstring below.

        A statement that shares its line with another has its own span only.
        """
        body = self.tree.body
        if any(other is not node and other.lineno == node.lineno for other in body):
            return self.span(node)  # a = 1; b = 2
        decorators = getattr(node, "decorator_list", ())
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        lines = self.text.splitlines()
        while first > 1 and lines[first - 2].strip().startswith("#"):
            first -= 1
        last = node.end_lineno or node.lineno
        if isinstance(node, ast.Assign | ast.AnnAssign) and node in body[:-1]:
            after = body[body.index(node) + 1]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                last = after.end_lineno or last
        return self._line_starts[first - 1], self._line_starts[min(last, len(lines))]

    def edited(self, span: tuple[int, int], edits: Sequence[Edit]) -> str:
        """The text in ``span`` with the edits made; an edit inside another is left out."""
        start, end = span
        parts, position = [], start
        for edit in sorted(edits, key=lambda edit: (edit.start, -edit.end)):
            if edit.start < position or edit.end > end:
                continue
            parts += [self.bytes[position : edit.start], edit.text.encode()]
            position = edit.end
        return b"".join([*parts, self.bytes[position:end]]).decode()


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")


@lru_cache(maxsize=256)
def _cached(file: str, text: str) -> Source:
    return Source(file, text)


def source_of(file: str, namespace: dict[str, Any]) -> Source | None:
    """The source of a file or of a notebook's cell; None if there is none or it is not Python."""
    linecache.checkcache(file)
    text = "".join(linecache.getlines(file, namespace))
    if not text:
        return None
    source = _cached(file, text)
    try:
        return source if source.tree else None
    except SyntaxError:
        return None
