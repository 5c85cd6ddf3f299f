"""The import statements of a script."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


@dataclass
class ImportStatements:
    """``modules``: pairs of a module and its name in the script. ``names``: for each module, pairs
    of a name in it and its name in the script.
    """

    modules: set[tuple[str, str]] = field(default_factory=set)
    names: dict[str, set[tuple[str, str]]] = field(default_factory=dict)

    def blocks(self) -> list[str]:
        """The source in two blocks: first the imports of Python's own modules, then all others."""
        statements: list[tuple[str, str]] = []
        names = {module: set(pairs) for module, pairs in self.names.items()}
        for module, output in self.modules:
            parent, _, last = module.rpartition(".")
            if output == module.split(".")[0]:
                statements.append((module, f"import {module}"))
            elif last == output:
                names.setdefault(parent, set()).add((last, output))
            else:
                statements.append((module, f"import {module} as {output}"))
        for module, pairs in names.items():
            listed = [
                name if name == output else f"{name} as {output}" for name, output in sorted(pairs)
            ]
            statements.append((module, f"from {module} import {', '.join(listed)}"))
        standard = {line for line in statements if line[0].split(".")[0] in sys.stdlib_module_names}
        groups = (standard, set(statements) - standard)
        blocks = ["\n".join(line for _, line in sorted(group, key=_order)) for group in groups]
        return [block for block in blocks if block]


def _order(statement: tuple[str, str]) -> tuple[bool, str]:
    module, line = statement
    return line.startswith("from"), module
