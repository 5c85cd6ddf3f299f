"""Installs the pretended GPUs in every process that has this folder on its PYTHONPATH.

Python imports this file when it starts. Nothing happens unless PRETEND_GPUS is set.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from types import CodeType, ModuleType
from typing import Any


def _pretend_gpus(_: ModuleType) -> None:
    from pretended_gpus import install

    install()


def _accept_tensors_of_pretended_gpus(module: ModuleType) -> None:
    from pretended_gpus import settings

    if settings.strict():
        from pretended_gpus import strict

        module.plain = strict.accepted_by(module.plain)  # type: ignore[attr-defined]


def _shard_on_the_host(module: ModuleType) -> None:
    """FSDP2 asks where the parameters of a mesh of CUDA devices are."""
    from pretended_gpus import settings

    if not settings.strict():
        import torch

        module._get_device_from_mesh = lambda mesh: torch.device("cpu")  # type: ignore[attr-defined]


def _build_on_the_host(module: ModuleType) -> None:
    """A rank builds its model and its batch on the CPU, before it moves them to its GPU."""
    from pretended_gpus import rounding

    for name in ("build_model", "build_whole_batch"):
        setattr(module, name, rounding.on_host(getattr(module, name)))


def _record_sends(module: ModuleType) -> None:
    """The flight recorder has what ranks of NCCL send to each other, and not those of gloo."""
    check: Any = module.check_recorder

    def checked(device: Any) -> None:
        check(device)
        if device.type == "cuda":
            module.record_sends()

    module.check_recorder = checked  # type: ignore[attr-defined]


AFTER = {
    "torch": _pretend_gpus,
    "torch.distributed.fsdp._fully_shard._fully_shard": _shard_on_the_host,
    "ddp_equivalence.ranks.process": _record_sends,
    "ddp_equivalence.case.build": _build_on_the_host,
    "ddp_equivalence.measurement.calls": _accept_tensors_of_pretended_gpus,
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


class _AsFileOfTorch(SourceFileLoader):
    """Loads a module of the pretended GPUs under the name of a file of torch, in whose place it is.

    A report does not show the lines of torch, nor say that one of them has changed a gradient.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        spec = PathFinder.find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        name = os.path.join(os.path.dirname(spec.origin), *fullname.split("."))
        code: CodeType = compile(self.get_data(path), f"{name}.py", "exec", dont_inherit=True)
        return code


class _PretendedGpus(MetaPathFinder):
    """Finds the modules of the pretended GPUs."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if not name.startswith("pretended_gpus"):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _AsFileOfTorch(name, spec.origin)
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
    sys.meta_path[:0] = [_AfterImports(), _PretendedGpus()]
    from pretended_gpus import say_so

    say_so.in_this_process()
