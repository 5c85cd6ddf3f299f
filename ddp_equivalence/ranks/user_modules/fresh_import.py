"""Imports modules of the user in a new process, and describes what the imports alone give.

The process has the environment of the caller, not that of a rank. What a rank's own import gives
another value, such as its world size, is therefore no change that the caller has made.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch.multiprocessing as multiprocessing

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks import process_state, process_tree
from ddp_equivalence.ranks.importable import is_user_module
from ddp_equivalence.ranks.server import (
    empty_main_module,
    release_server,
    start_method,
    start_server,
)
from ddp_equivalence.ranks.user_modules.description import Description, describe
from ddp_equivalence.ranks.user_modules.import_watch import ImportWatch
from ddp_equivalence.ranks.user_modules.nodes import Node
from ddp_equivalence.ranks.workers import children_allowed

LONGEST = 60.0
"""Seconds that the process has for all imports, as long as a case has by default."""


@dataclass(frozen=True)
class Request:
    """``names``: what to import, in this order. ``described``: those to describe if imported."""

    names: Sequence[str]
    described: frozenset[str]
    import_path: Sequence[str]
    working_folder: str
    environment: Mapping[bytes, bytes]


@dataclass(frozen=True)
class FreshImport:
    """``description``: of the modules, those first that others import. ``failed``: name -> error.

    ``variables``: those environment variables that were read during the imports, and their values.
    ``alone``: what each module held when its own import was complete.
    """

    description: Description
    failed: Mapping[str, str]
    variables: Mapping[str, str | None]
    alone: Mapping[str, Node]

    def one_fills_another(self) -> bool:
        """True if a later import changed a module, as it does a registry of functions."""
        return any(self.alone.get(name) != node for name, node in self.description.nodes.items())


def import_freshly(request: Request) -> FreshImport | None:
    """Import the modules in a new process. None if it ends early: the ranks will then say why.

    Raises BadCase if this takes too long.
    """
    method = start_method()
    context: Any = multiprocessing.get_context(method)
    with ExitStack() as opened:
        try:
            if method == "forkserver":
                start_server()
            receiver, sender = context.Pipe(duplex=False)
            opened.callback(receiver.close)
            with sender, empty_main_module(), children_allowed():
                process = context.Process(target=_main, args=(request, sender), daemon=True)
                process.start()
        except (OSError, EOFError):
            return None
        opened.callback(_end, process)
        with suppress(EOFError, OSError):
            if receiver.poll(LONGEST):
                result: FreshImport = receiver.recv()
                return result
            names = ", ".join(request.names)
            right = f"modules that can be imported within {LONGEST:g} s: {names} cannot, so that "
            raise BadCase(
                "step", names, right + "nobody knows what this process has changed in them"
            )
    return None


def _end(process: Any) -> None:
    process_tree.kill(process_tree.descendants(process.pid))
    process.kill()
    process.join()
    process.close()


def _main(request: Request, sender: Connection) -> None:
    release_server()
    process_tree.die_with_parent()
    faulthandler.disable()
    with open(os.devnull, "r+b") as nowhere:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    process_state.set_environment(request.environment)
    sys.path[:] = request.import_path
    with suppress(OSError):
        os.chdir(request.working_folder)
    watch, alone = ImportWatch(), Description()

    def describe_alone(module: ModuleType) -> None:
        if module.__name__ in request.described and is_user_module(module):
            alone.add(module)

    watch.after_each = describe_alone
    watch.start()
    read: dict[str, str | None] = {}
    failed: dict[str, str] = {}
    _record_reads(read)
    for name in request.names:
        try:
            import_module(name)
        except BaseException as error:  # SystemExit too
            failed[name] = f"{type(error).__name__}: {error}"
    variables = dict(read)
    modules = [sys.modules[name] for name in watch.imported if name in request.described]
    description = describe([module for module in modules if is_user_module(module)])
    sender.send(FreshImport(description, failed, variables, alone.nodes))
    sender.close()
    os._exit(0)


def _record_reads(read: dict[str, str | None]) -> None:
    """From now on, note which environment variables are read, and their values."""

    class Environment(type(os.environ)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> str:
            try:
                value: str = super().__getitem__(name)
            except KeyError:
                read[name] = None
                raise
            read[name] = value
            return value

    os.environ.__class__ = Environment
