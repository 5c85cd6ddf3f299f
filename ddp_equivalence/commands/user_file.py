"""Load a user's own case and step from a Python file that the command line names."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from dataclasses import dataclass, field
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.errors import BadCase, Words, of_type, one_of, what_is_hidden
from ddp_equivalence.strategies import STRATEGIES

CONVENTION = (
    "a file with `case = Case(...)` and `def step(model, shard, rank)`; FILE.py:NAME takes another "
    "step, a tuple (case, step) or (case, step, options of check), or a strategy"
)


@dataclass(frozen=True)
class UserCheck:
    """The arguments that a user's file gives for ``check``.

    ``options``: from the tuple or the file's ``options`` dict; empty if the file has neither.
    """

    case: Case
    step: Any
    options: dict[str, Any] = field(default_factory=dict)


def load(path: Path, name: str) -> UserCheck:
    """Run the file, and return the step of this name and its case.

    Raises BadCase if the file raises an error, or has no such step or no case.
    """
    module = _run_file(path)
    step = getattr(module, name, None)
    if isinstance(step, Case):
        raise BadCase("NAME", name, f"a step: {name} is a Case; write {CONVENTION}")
    case, options = getattr(module, "case", None), getattr(module, "options", {})
    if isinstance(step, list | tuple) and len(step) in (2, 3) and isinstance(step[0], Case):
        case, step, options = step if len(step) == 3 else (*step, options)
    if not isinstance(options, dict):
        raise BadCase("options", options, "a dict of keyword arguments of check()")
    if not isinstance(case, Case):
        value = Words("missing") if case is None else of_type(case)
        raise BadCase("case", value, f"a Case in {path.name}: write {CONVENTION}")
    if step is None and name in STRATEGIES:
        step = name
    if step is None:
        from ddp_equivalence.measurement.work import why_not_a_step

        own = [one for one in vars(module).values() if isfunction(one) and not why_not_a_step(one)]
        steps = [one.__name__ for one in own if one.__module__ == module.__name__]
        right = one_of(steps, name) if steps else f"or write {CONVENTION}"
        raise BadCase("NAME", name, f"a step in {path.name}, {right}")
    return UserCheck(case, step, options)


def _run_file(path: Path) -> ModuleType:
    """Import the file as a module with a name of our own. Its folder is put on sys.path."""
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
        end = "".join(traceback.format_exception(error)[-4:]).rstrip()
        right = f"a file that can be imported; it raised:\n{end}"
        hidden = what_is_hidden(path.resolve().parent, end)
        raise BadCase("FILE", str(path), right + hidden) from error
    return module
