"""The files that a script carries, which are modules of the user's that its case and step need,
whole; and expressions for values of this process: names in these files, or how to make them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import math
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.ranks.importable import belongs_to_user

PACKAGE = "ddp_equivalence"

CARRIED = tuple(f"{PACKAGE}.{name}." for name in ("case.models", "case.losses", "strategies"))
"""A script carries single files of the catalogue. It stands in for all other modules of this
package."""

PROVIDED = frozenset(
    (
        *("Case", "Rank", "Strategy", "Task", "TrainStep", "Indices", "ShardedBatch", "Layout"),
        *("LOSSES", "catalogue_loss_of", "process_state"),
        *("take", "count_examples", "map_tensors", "tensors_of", "concatenate"),
    )
)
"""The names that a script has itself for files that import them from this package. Files of the
user's import only the first two."""

OWN_PATH = r"(?<![\w.])__file__\b"

PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "pytest.ini", "tox.ini", ".git")


def text_in(file: str) -> str:
    """The text of a Python file; empty if there is none."""
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))


class NoSource(ValueError):
    """A value that a script cannot contain; the message says which and why."""


@dataclass
class CarriedFiles:
    """Collects the modules that a script needs, with all those of the same project they import.

    ``texts``: path -> text of each file. ``stand_ins``: modules of this package that the files
    import. ``installed``: other packages that they import. ``not_carried``: files they import from
    another project. ``reading_beside``: files that ask where they are.
    """

    texts: dict[str, str] = field(default_factory=dict)
    stand_ins: set[str] = field(default_factory=set)
    installed: set[str] = field(default_factory=set)
    not_carried: set[str] = field(default_factory=set)
    reading_beside: set[str] = field(default_factory=set)
    _names: dict[str, str] = field(default_factory=dict)
    _projects: set[Path] = field(default_factory=set)

    def name_of(self, module: ModuleType) -> str:
        """The name under which the script imports this module. Carries it if it is the user's.

        Raises NoSource for a module of the user's without a file.
        """
        name, file = module.__name__, getattr(module, "__file__", None)
        if name == "__main__":
            self._projects.add(_project_of(file or "."))
            spec = module.__spec__  # python -m package.module has one
            name = "__main__" if spec is None else spec.name
            return self._carry(name, file or "", _without_checks)
        if is_own(name):
            return self._carry(name, str(file))
        if isinstance(file, str) and belongs_to_user(file):
            self._projects.add(_project_of(file))
            return self._carry(name, file)
        self._follow(name, ())
        return name

    @property
    def modules(self) -> list[str]:
        """The modules of this process whose files are carried."""
        return list(self._names)

    def text_of(self, module: ModuleType) -> str:
        """The text of a module that is carried."""
        name = self.name_of(module)
        return self.texts.get(_path(name, False)) or self.texts.get(_path(name, True), "")

    def _carry(self, name: str, file: str, read: Callable[[str], str] = text_in) -> str:
        if name in self._names:
            return self._names[name]
        is_package = Path(file).stem == "__init__"
        script_name = name
        if not is_package and name.rpartition(".")[2] != Path(file).stem:  # loaded by its path
            script_name = re.sub(r"\W", "_", Path(file).stem)
            while _path(script_name, False) in self.texts or script_name in sys.stdlib_module_names:
                script_name += "_"
        self._names[name] = script_name
        text = read(file)
        if not text:
            raise NoSource(f"{name} has no source")
        if re.search(OWN_PATH, text) and not is_own(name):
            text = re.sub(OWN_PATH, repr(file), text)
            self.reading_beside.add(file)
        self.texts[_path(script_name, is_package)] = text
        self._carry_packages_of(script_name)
        for imported, names in _imports(ast.parse(text), name if is_package else _parent(name)):
            self._follow(imported, names)
        return script_name

    def _carry_packages_of(self, module: str) -> None:
        while module := _parent(module):
            if is_own(module):
                self.stand_ins.add(module)
            elif (file := _file_of(module)) is not None and text_in(file):
                self._carry(module, file)
            else:
                self.texts.setdefault(_path(module, True), "")

    def _follow(self, name: str, names: Sequence[str]) -> None:
        """Carry the modules that a file imports, if they are of the same project."""
        for module in (name, *(f"{name}.{each}" for each in names)):
            file = _file_of(module)
            if is_own(module):
                self._follow_own(module, file, names)
            elif file is None:  # a namespace, or a name in a module
                continue
            elif not belongs_to_user(file):
                self.installed.add(module.partition(".")[0])
            elif any(Path(file).resolve().is_relative_to(project) for project in self._projects):
                self._carry(module, file)
            else:
                self.not_carried.add(file)

    def _follow_own(self, module: str, file: str | None, names: Sequence[str]) -> None:
        is_file = file is not None and Path(file).stem != "__init__"
        if is_file and module.startswith(CARRIED) and not PROVIDED.issuperset(names):
            self._carry(module, str(file))
        elif module in sys.modules:
            self.stand_ins.add(module)
            self._carry_packages_of(module)


def is_own(module: str) -> bool:
    """True for a module of this package."""
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def _path(module: str, is_package: bool) -> str:
    return module.replace(".", "/") + ("/__init__.py" if is_package else ".py")


def _parent(module: str) -> str:
    return module.rpartition(".")[0]


def _project_of(file: str) -> Path:
    """The folder of the project that a file belongs to; the file's own folder if it is in none."""
    folder = Path(file).resolve().parent
    for candidate in (folder, *folder.parents):
        if any((candidate / name).exists() for name in PROJECT_FILES):
            return candidate
    return folder


def _file_of(name: str) -> str | None:
    """The Python file of a module, which may not be imported yet."""
    top = name.partition(".")[0]
    imported = sys.modules.get(name)
    if imported is None and top not in sys.stdlib_module_names:
        of_top = name != top and _file_of(top)
        if of_top and not belongs_to_user(of_top):
            return of_top
        try:
            spec = find_spec(name)
        except (ImportError, ValueError, AttributeError):  # it is no module
            return None
        return spec.origin if spec is not None and spec.has_location else None
    file = getattr(imported, "__file__", None)
    return file if isinstance(file, str) else None


def _imports(node: ast.AST, package: str) -> Iterator[tuple[str, list[str]]]:
    """The modules that a file of this package imports, with the names that it takes from each."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, []) for alias in child.names)
        if isinstance(child, ast.ImportFrom):
            relative = "." * child.level + (child.module or "")
            yield resolve_name(relative, package), [alias.name for alias in child.names]
        yield from _imports(child, package)


# A file that was started itself makes checks while it runs.

CALLS = {"check", "assert_equivalent", "export", "export_request", "observe"}


def _without_checks(file: str) -> str:
    """The file, with empty lines for statements that make checks.

    Statements that use a result of these are left out, too. Definitions all stay.
    """
    text, gone = text_in(file), set(CALLS)
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        attributes = (one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute))
        if not gone.isdisjoint({*(name.id for name in names), *attributes}):
            gone |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
            for line in range(statement.lineno - 1, statement.end_lineno or 0):
                lines[line] = ""
    return "".join(f"{line}\n" for line in lines)


# Expressions for values: names in the files, or how to make them.


class Expressions:
    """``lines``: the statements of the script that the expressions need, in order.

    ``taken``: names that the script has for other things.
    """

    def __init__(self, files: CarriedFiles, taken: frozenset[str]) -> None:
        self.lines: list[str] = []
        self._files = files
        self._taken = set(taken)
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []

    def of(self, value: Any) -> str:
        """An expression that has this value in the script. Raises NoSource if there is none."""
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, functools.partial):
            self._import("import functools")
            parts = [self.of(value.func), *map(self.of, value.args)]
            parts += [f"{name}={self.of(argument)}" for name, argument in value.keywords.items()]
            return f"functools.partial({', '.join(parts)})"
        if isinstance(value, ModuleType):
            return self.module(value)
        if isinstance(value, MethodType):
            return f"{self.of(value.__self__)}.{value.__name__}"
        if isinstance(value, FunctionType | type) or _is_found(value):
            return self._function_or_class(value)
        return self._literal(value)

    def module(self, module: ModuleType) -> str:
        """The variable of the script that holds this module."""
        if is_own(module.__name__) and not module.__name__.startswith(CARRIED):
            raise NoSource(f"it uses {module.__name__}")
        name = self._files.name_of(module)
        if id(module) not in self._names:
            self._import("from importlib import import_module")
            self._bind(module, name.rpartition(".")[2], f'import_module("{name}")')
        return self._names[id(module)]

    def _held(self, value: Any, modules: list[str]) -> str:
        """The variable of one of these imported modules that holds the value, or "".

        The field of a case counts as a variable.
        """
        for module in filter(None, map(sys.modules.get, modules)):
            for name, one in list(vars(module).items()):
                if one is value:
                    return f"{self.module(module)}.{name}"
                if isinstance(one, Case):
                    for part, held in vars(one).items():
                        if held is value:
                            return f"{self.module(module)}.{name}.{part}"
        return ""

    def _import(self, statement: str) -> None:
        if statement not in self.lines:
            self.lines.insert(0, statement)

    def _bind(self, value: Any, wanted: str, expression: str) -> str:
        name = wanted
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._names[id(value)] = name
        self._kept.append(value)  # so that no other value gets its id
        self.lines.append(f"{name} = {expression}")
        return name

    def _function_or_class(self, value: Any) -> str:
        name, module = value.__qualname__, sys.modules.get(value.__module__)
        if value.__module__ == "builtins" or (is_own(value.__module__) and name in PROVIDED):
            return str(name)
        if module is None:
            raise NoSource(f"{name} has no source")
        if _is_found(value):
            self._check_that_file_defines(module, name.partition(".")[0])
            return f"{self.module(module)}.{name}"
        if held := self._held(value, [module.__name__]):
            return held
        make = self._local_function if isinstance(value, FunctionType) else self._local_class
        return make(value, module)

    def _check_that_file_defines(self, module: ModuleType, name: str) -> None:
        if module.__name__ == "__main__":
            text = self._files.text_of(module)
            if name not in symtable.symtable(text, "", "exec").get_identifiers():
                raise NoSource(f"{name} is defined in a statement that makes a check")

    def _local_function(self, value: FunctionType, module: ModuleType) -> str:
        code, name = value.__code__, self.module(module)
        line = code.co_firstlineno
        whole = compile(self._files.text_of(module), "", "exec", dont_inherit=True)
        place = code.co_qualname, line
        codes = [one for one in codes_in(whole) if (one.co_qualname, one.co_firstlineno) == place]
        if not codes:
            raise NoSource(f"{value.__qualname__} has no source")
        positions = list(code.co_positions())
        number = next((n for n, one in enumerate(codes) if [*one.co_positions()] == positions), 0)
        arguments = f'{name}, "{code.co_qualname}", {line}' + (f", {number}" if number else "")
        wanted = value.__name__ if value.__name__.isidentifier() else "function"
        output = self._bind(value, wanted, f"function_in({arguments})")
        defaults = self.of(value.__defaults__), self.of(value.__kwdefaults__)
        held = inspect.getclosurevars(value).nonlocals
        enclosed = [f"{name}={self.of(one)}" for name, one in held.items()]
        if enclosed or defaults != ("None", "None"):
            self.lines.append(f"enclose({', '.join([output, *defaults, *enclosed])})")
        return output

    def _local_class(self, value: type, module: ModuleType) -> str:
        name, held = value.__name__, dict[str, Any]()
        for method in filter(inspect.isfunction, vars(value).values()):
            held |= inspect.getclosurevars(method).nonlocals
        held = {free: one for free, one in held.items() if one is not value}
        try:
            lines, first = inspect.getsourcelines(value)
            exec(textwrap.dedent("".join(lines)), {**vars(module), **held})
        except Exception as error:  # the body of the class may raise anything
            raise NoSource(f"{value.__qualname__} cannot be made anew: {error}") from error
        arguments = [self.module(module), repr(name), str(first), str(first + len(lines) - 1)]
        arguments += [f"{free}={self.of(one)}" for free, one in held.items()]
        return self._bind(value, name, f"class_in({', '.join(arguments)})")

    def _literal(self, value: Any) -> str:
        if value is None or value is ... or type(value) in (bool, int, complex, str, bytes):
            return "..." if value is ... else repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if isinstance(value, torch.dtype | torch.device | torch.Size):
            return str(value) if isinstance(value, torch.dtype) else f"torch.{value!r}"
        if type(value) in (range, slice):
            return repr(value)
        if type(value) is tuple:
            return f"({''.join(f'{self.of(one)}, ' for one in value).rstrip(' ')})"
        if type(value) in (list, set, frozenset):
            return f"{type(value).__name__}([{', '.join(map(self.of, value))}])"
        if type(value) is dict:
            items = (f"{self.of(key)}: {self.of(one)}" for key, one in value.items())
            return f"{{{', '.join(items)}}}"
        modules = [type(value).__module__, *self._files.modules]
        if is_own(modules[0]):
            modules += [name for name in sys.modules if name.startswith(CARRIED)]
        if held := self._held(value, modules):
            return held
        raise NoSource(f"it uses a {type(value).__name__} that no module holds under a name")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """The code of every function in this code, in the order of the text."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from codes_in(part)


def _is_found(value: Any) -> bool:
    """True if the module of a function or class has it under its name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "?").split("."):
        found = getattr(found, part, None)
    return found is value and value is not None
