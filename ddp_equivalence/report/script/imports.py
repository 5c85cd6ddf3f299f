"""The import lines of a script."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass
class Imports:
    """Modules as ``(module, name in the script)``, and names of modules, with their new names."""

    modules: set[tuple[str, str]] = field(default_factory=set)
    names: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Python's own first, then the others."""
        statements: list[tuple[str, str]] = []
        for module, name in self.modules:
            plain = name == module.split(".")[0] if "." in module else name == module
            parent, _, last = module.rpartition(".")
            if plain:
                statements.append((module, f"import {module}"))
            elif last == name:
                self.names.setdefault(parent, set()).add((last, name))
            else:
                statements.append((module, f"import {module} as {name}"))
        for module, names in self.names.items():
            listed = [a if a == b else f"{a} as {b}" for a, b in sorted(names)]
            statements.append((module, f"from {module} import {', '.join(listed)}"))
        of_python = {one for one in statements if one[0].split(".")[0] in sys.stdlib_module_names}
        groups = (of_python, set(statements) - of_python)
        parts = ["\n".join(line for _, line in sorted(group, key=_order)) for group in groups]
        return [part for part in parts if part]


def _order(statement: tuple[str, str]) -> tuple[bool, str]:
    module, line = statement
    return line.startswith("from"), module
