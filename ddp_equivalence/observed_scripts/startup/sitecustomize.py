"""Python imports this when it starts, in every process of an observed script.

The folder stands first in PYTHONPATH. Once torch has been imported, the package's own watch begins;
until then nothing is imported. What the script does not seed itself is seeded. A ``sitecustomize``
of the user's own is run as well.
"""

import ctypes
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function when the module of this name has been imported."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
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
            with _quick():
                run(module)
            self._then()

        loader: Any = spec.loader
        loader.exec_module = exec_module
        return spec


@contextmanager
def _quick() -> Iterator[None]:
    """Import without garbage collections, which take a fifth of the import of torch, and without
    this package's watch over calls. A profiler of the user's goes on.
    """
    collects, profile = gc.isenabled(), sys.getprofile()
    is_own = type(getattr(profile, "__self__", None)).__module__.startswith("ddp_equivalence.")
    gc.disable()
    if is_own:
        sys.setprofile(None)
    try:
        yield
    finally:
        if is_own:
            sys.setprofile(profile)
        if collects:
            gc.enable()


def _nothing() -> None:
    """DDP and optimizers import torch._dynamo when they are made, which takes a second."""


def _seed() -> int:
    """A number that is the same in every run, and another one on every rank.

    What a script does not seed would otherwise be another in the run in which it is watched.
    """
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    known = [os.environ.get(name, "") for name in names]
    known += [word for word in sys.orig_argv if "spawn_main" in word]  # of multiprocessing
    return zlib.crc32(" ".join(known).encode())


def _seed_numpy() -> None:
    import numpy.random

    numpy.random.seed(_seed())


def _begin() -> None:
    import torch

    torch.manual_seed(_seed())
    from ddp_equivalence.observed_scripts.in_script.begin import begin

    begin()


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
    random.seed(_seed())
    sys.meta_path.insert(0, _AfterImport("numpy", _seed_numpy))
    sys.meta_path.insert(0, _AfterImport("torch._dynamo", _nothing))
    sys.meta_path.insert(0, _AfterImport("torch", _begin))
_run_the_users_own()
