"""Expressions of a script for values of this process: names in its files, or how to make them."""

from __future__ import annotations

import functools
import inspect
import math
import symtable
import sys
import textwrap
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ddp_equivalence.case.case import Case
from ddp_equivalence.report.script.files import (
    CARRIED,
    PROVIDED,
    CarriedFiles,
    NoSource,
    is_own,
)


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
