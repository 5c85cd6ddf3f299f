"""Write a value as an expression of the script: a literal, or the name of its definition."""

from __future__ import annotations

import functools
import sys
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ddp_equivalence.report.script.slicing.definitions import Definitions
from ddp_equivalence.report.script.slicing.import_resolver import ImportResolver
from ddp_equivalence.report.script.slicing.literals import literal
from ddp_equivalence.report.script.slicing.local_definitions import local_definition
from ddp_equivalence.report.script.slicing.no_source import NoSource
from ddp_equivalence.report.script.slicing.sliceable import is_installed, is_own_module
from ddp_equivalence.report.script.slicing.source import source_of
from ddp_equivalence.report.script.slicing.source_module import SourceModule, source_module


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
