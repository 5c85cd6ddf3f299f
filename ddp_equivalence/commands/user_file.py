"""A user's own case and step, from a Python file named on the command line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.strategies import STRATEGIES

CONVENTION = (
    "a file with `case = Case(...)` and `def step(model, shard, rank)`; FILE.py:NAME takes another "
    "step, a tuple (case, step) or (case, step, options of check), or a strategy's name"
)


@dataclass(frozen=True)
class UserCheck:
    """What to call ``check`` with. ``options``: the file's own ``options`` dict, if it has one."""

    case: Case
    step: Any
    options: dict[str, Any] = field(default_factory=dict)


def load(path: Path, name: str) -> UserCheck:
    """Run the file and take the step of this name, with its case.

    Raises BadCase if the file raises itself, or has no such case and step.
    """
    if not name:
        raise BadCase("NAME", name, CONVENTION)
    module = _run(path)
    found = getattr(module, name, None)
    if isinstance(found, Case):
        raise BadCase("NAME", name, f"a step: this one is a Case; {CONVENTION}")
    options = getattr(module, "options", {})
    if isinstance(found, tuple) and len(found) == 3:
        *found, options = found
    if not isinstance(options, dict):
        raise BadCase("options", options, "a dict of keyword arguments of check()")
    if isinstance(found, list | tuple) and len(found) == 2 and isinstance(found[0], Case):
        return UserCheck(found[0], found[1], options)
    case = getattr(module, "case", None)
    if not isinstance(case, Case):
        value = "none" if case is None else type(case).__name__
        raise BadCase("case", value, f"in {path.name}: {CONVENTION}")
    if found is None and name in STRATEGIES:
        return UserCheck(case, name, options)
    if found is None:
        raise BadCase("NAME", name, f"not in {path.name}; {CONVENTION}")
    return UserCheck(case, found, options)


def _run(path: Path) -> ModuleType:
    """Import the file under a name that is nobody else's, its own folder importable."""
    name = f"ddp_equivalence_user_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise BadCase("FILE", str(path), "a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BadCase:
        raise
    except (Exception, SystemExit) as error:
        last = "".join(traceback.format_exception(error)[-4:]).rstrip()
        raise BadCase(
            "FILE", str(path), f"a file that can be imported; it raised:\n{last}"
        ) from error
    return module
