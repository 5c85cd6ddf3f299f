"""Installs the pretended GPUs in every process that has this folder on its PYTHONPATH.

Python imports this file when it starts. Nothing happens unless PRETEND_GPUS is set.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any


def _pretend_gpus(_: ModuleType) -> None:
    from pretended_gpus import install

    install()


def _accept_tensors_of_pretended_gpus(module: ModuleType) -> None:
    from pretended_gpus import settings

    if settings.strict():
        from pretended_gpus import strict

        module.plain = strict.accepted_by(module.plain)  # type: ignore[attr-defined]


AFTER = {
    "torch": _pretend_gpus,
    "ddp_equivalence.measurement.plain_tensors": _accept_tensors_of_pretended_gpus,
}
"""Module -> what is done right after its import."""


class _AfterImports(MetaPathFinder):
    """Finds each module in ``AFTER`` once, and lets its import end with what is to be done."""

    def __init__(self) -> None:
        self._left = dict(AFTER)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name not in self._left:
            return None
        then = self._left.pop(name)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_both(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec


def _next_site_customisation() -> ModuleSpec | None:
    """The sitecustomize that this file hides, if the machine has one."""
    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    return PathFinder.find_spec("sitecustomize", elsewhere)


def _run_next_site_customisation() -> None:
    spec = _next_site_customisation()
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_next_site_customisation()
if os.environ.get("PRETEND_GPUS"):
    sys.meta_path.insert(0, _AfterImports())
    from pretended_gpus import say_so

    say_so.in_this_process()
