"""Python imports this when it starts, in every process of an observed script.

The folder stands first in PYTHONPATH. Once torch has been imported, the package's own watch begins;
until then nothing is imported. A ``sitecustomize`` of the user's own is run as well.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _BeginAfterTorch(importlib.abc.MetaPathFinder):
    """Lets the watch begin when torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        # Libraries ask for the spec of torch without importing it, so this stays in its place.
        finders = [finder for finder in sys.meta_path if finder is not self]
        spec = next(
            (one for finder in finders if (one := finder.find_spec(name, path, target))), None
        )
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            from ddp_equivalence.observed_scripts.in_script.begin import begin

            begin()

        loader: Any = spec.loader
        loader.exec_module = exec_module
        return spec


def _run_the_users_own() -> None:
    """Run the ``sitecustomize`` that Python would have found without this one."""
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _end_with_the_judge() -> None:
    """The launcher gets SIGTERM when the process that judges ends, and ends its ranks then."""
    if os.environ.get("DDP_EQUIVALENCE_STARTED_BY") == str(os.getppid()):
        pr_set_pdeathsig = 1  # an option of prctl(2)
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGTERM))


if os.environ.get("DDP_EQUIVALENCE_OBSERVE"):
    _end_with_the_judge()
    sys.meta_path.insert(0, _BeginAfterTorch())
_run_the_users_own()
