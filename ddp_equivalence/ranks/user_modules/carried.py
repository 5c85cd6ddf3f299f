"""Brings the ranks' imports of the user's modules into the state in which the caller has them."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch.multiprocessing as multiprocessing

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks import process_state, process_tree
from ddp_equivalence.ranks.importable import (
    belongs_to_user,
    imported_user_modules,
    is_in_installation_folder,
    is_user_module,
    spec_of,
)
from ddp_equivalence.ranks.process_state import IGNORED_VARIABLES, environment_variables
from ddp_equivalence.ranks.server import (
    empty_main_module,
    release_server,
    start_method,
    start_server,
)
from ddp_equivalence.ranks.user_modules import description, difference
from ddp_equivalence.ranks.user_modules.description import (
    CLASS,
    FUNCTION,
    KEPT,
    MANY,
    NAMED,
    Description,
    Node,
    Path,
    describe,
)
from ddp_equivalence.ranks.user_modules.difference import (
    CONTENTS,
    DELETE,
    SET_IT,
    Difference,
    Edit,
    differences,
)
from ddp_equivalence.ranks.workers import children_allowed

# Imports modules of the user in a new process, and describes what the imports alone give.
#
# The process has the environment of the caller, not that of a rank. What a rank's own import
# gives another value, such as its world size, is therefore no change that the caller has made.

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


# Finds what the caller has changed in the user's modules since they were imported.

MAX_KNOWN = 64
"""The results of at most this many fresh imports are kept."""


@dataclass(frozen=True)
class Changes:
    """``edits``: module -> the edits that make a fresh import like the caller's module.

    ``compared``: the modules that were compared. ``failed``: module -> why it could not be imported
    for that. ``places``: the id of an object -> the path at which a fresh import has it too.
    ``sent``: the ids of the objects that edits put into the modules. ``imports``: what a rank must
    import, in this order, so that its modules are those of the fresh import.
    """

    compared: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, list[Edit]] = field(default_factory=dict)
    places: Mapping[int, Path] = field(default_factory=dict)
    sent: frozenset[int] = frozenset()
    imports: Sequence[str] = ()


NO_CHANGES = Changes()


@dataclass(frozen=True)
class _Known:
    """A fresh import, and the files of its modules at that time."""

    fresh: FreshImport
    files: Mapping[str, object]


_known: OrderedDict[frozenset[str], _Known] = OrderedDict()
_versions: dict[str, tuple[object, Node | None]] = {}
"""Module -> its file and its node after its own import, in the latest fresh one."""

_version = 0


def version() -> int:
    """A number that grows whenever a fresh import of a module gives something else than before.

    Ranks that imported the module earlier then have an outdated one.
    """
    return _version


def changes(needed: Iterable[str], codes: Iterable[CodeType]) -> Changes:
    """What the caller has changed in these modules, and in all that they import.

    ``codes``: more code that runs on the ranks, and may import modules. Raises BadCase for a change
    that cannot travel.
    """
    modules = imported_user_modules()
    codes = tuple(codes)
    names = (set(needed) & modules.keys()) | _mentioned(codes, modules)
    if not names and not codes:
        return NO_CHANGES
    names |= _noticed & modules.keys()
    if not names:
        return NO_CHANGES
    while True:
        fresh = _freshly_imported(frozenset(names), modules)
        if fresh is None:
            return NO_CHANGES  # the ranks cannot import them either, and will say why
        present = fresh.description
        now = describe([modules[name] for name in present.nodes if name in modules])
        found = differences(wanted=now, present=present)
        named = {name for one in found if one.wanted for name in _named(one.wanted)}
        more = _mentioned(now.functions, modules) | (named & modules.keys())
        if more <= names | present.nodes.keys():
            imports = [name for name in modules if name in names - fresh.failed.keys()]
            return replace(
                _changes(found, now),
                failed=fresh.failed,
                imports=imports if fresh.one_fills_another() else (),
            )
        names |= more - present.nodes.keys()


def notice(imported: Iterable[str]) -> bool:
    """Compare these modules too from now on, since work on ranks has imported them.

    No name in the code told so. Returns True if that work should have been sent changes of them.
    """
    new = set(imported) & imported_user_modules().keys()
    _noticed.update(new)
    return bool(new and changes(new, ()).edits)


_noticed: set[str] = set()


def _named(node: Node) -> Iterator[str]:
    """The names of modules whose functions and objects it holds, and which may put it there."""
    kind, what, children = node
    if kind == NAMED and isinstance(what, tuple):
        yield from what
    elif isinstance(what, str):
        yield what.rpartition(".")[0]
    for _, child in children:
        yield from _named(child)


def _changes(found: Iterable[Difference], now: Description) -> Changes:
    edits: dict[str, list[Edit]] = {}
    replaced: set[Path] = set()
    for one in found:
        module = sys.modules[one.path[0]]
        value = description.read_or_missing(module, one.path[1:]) if one.action != DELETE else None
        if not _can_travel(one, value, now):
            continue
        if one.action == CONTENTS:
            value = description.contents(value)
        plain = one.wanted is not None and one.wanted[0] == MANY
        if plain:  # pickled with all else, each of its constants would take a microsecond
            value = pickle.dumps(value, protocol=5)
        edit = Edit(one.path[1:], one.action, value, plain)
        edits.setdefault(one.path[0], []).append(edit)
        if one.action != DELETE:
            replaced.add(one.path)
    places = now.places
    if replaced:
        contents = {path for path in replaced if _is_refilled(path, edits)}
        places = {
            place: path
            for place, path in places.items()
            if not replaced.intersection(description.prefixes(path)) or path in contents
        }
    sent = frozenset(now.places.keys() - places.keys())
    return Changes(frozenset(now.nodes), edits=edits, places=places, sent=sent)


def _is_refilled(path: Path, edits: Mapping[str, list[Edit]]) -> bool:
    return any(one.steps == path[1:] and one.action == CONTENTS for one in edits[path[0]])


def _can_travel(one: Difference, value: Any, now: Description) -> bool:
    """False for what is no change of the caller's. Raises BadCase for what cannot be sent."""
    module = sys.modules[one.path[0]]
    if _is_stale(one, value, module):
        if type(module.__loader__) is not SourceFileLoader:
            return False  # a loader such as pytest's changes the code of what it imports
        right = (
            f"the code in {module.__file__}, which the ranks import; the file is no longer what "
            "this process has imported: reload the module, or start again"
        )
        raise BadCase("step", description.text(one.path), right)
    if one.wanted is not None and one.wanted[0] == KEPT:
        if _is_private_to_a_library(one.path, module):
            return False
        right = (
            f"a value that can be pickled, since the module is not like this in a new import; "
            f"the ranks import {module.__name__}, and cannot be sent this {type(value).__name__}"
        )
        raise BadCase("step", description.text(one.path), right)
    return True


def _is_stale(one: Difference, value: Any, module: ModuleType) -> bool:
    """True if the module's own function or class has other code than in a fresh import."""
    if one.action != SET_IT or one.wanted is None or one.present is None:
        return False
    kinds = {one.wanted[0], one.present[0]}
    same_name = (
        isinstance(one.wanted[1], tuple)
        and isinstance(one.present[1], tuple)
        and (one.wanted[1][:2] == one.present[1][:2])
    )
    if kinds == {FUNCTION} and isinstance(value, FunctionType):
        return same_name and value.__code__.co_filename == module.__file__
    return kinds == {CLASS} and same_name and value.__module__ == module.__name__


def _is_private_to_a_library(path: Path, module: ModuleType) -> bool:
    """True for a private attribute of an object whose class belongs to an installed package."""
    kind, name = path[-1]
    if kind not in (description.FIELD, description.SLOT) or not str(name).startswith("_"):
        return False
    owner = description.read_or_missing(module, path[1:-1])
    return type(owner).__module__.partition(".")[0] not in {
        one.partition(".")[0] for one in imported_user_modules()
    }


def _freshly_imported(
    names: frozenset[str], modules: Mapping[str, ModuleType]
) -> FreshImport | None:
    """What a fresh import of these modules gives, as found now or earlier."""
    global _version
    known = _known.get(names)
    if known is not None and _is_up_to_date(known, modules):
        _known.move_to_end(names)
        return known.fresh
    files = {name: _file(module) for name, module in modules.items()}
    fresh = import_freshly(
        Request(
            names=[name for name in modules if name in names],  # as this process imported them
            described=frozenset(modules),
            import_path=list(sys.path),
            working_folder=os.getcwd(),
            environment=environment_variables(),
        )
    )
    if fresh is None:
        return None
    described = {name: files[name] for name in fresh.description.nodes}
    _known[names] = _Known(fresh, described)
    while len(_known) > MAX_KNOWN:
        _known.popitem(last=False)
    for name in fresh.description.nodes:
        before = _versions.get(name)
        _versions[name] = files[name], fresh.alone.get(name)
        if before is not None and before != _versions[name]:
            _version += 1
    return fresh


def _is_up_to_date(known: _Known, modules: Mapping[str, ModuleType]) -> bool:
    for name, file in known.files.items():
        if name in modules and _file(modules[name]) != file:
            return False
    return all(
        os.environ.get(name) == value
        for name, value in known.fresh.variables.items()
        if not name.startswith(IGNORED_VARIABLES)
    )


def _file(module: ModuleType) -> object:
    """The module's file, with the time of its last change and its size."""
    try:
        status = os.stat(str(module.__file__))
    except OSError:
        return module.__file__
    return module.__file__, status.st_mtime_ns, status.st_size


def _mentioned(codes: Iterable[CodeType], modules: Mapping[str, ModuleType]) -> set[str]:
    """The modules that this code names, so that it may import them when it runs."""
    words = set().union(*map(_words, codes))
    return {name for name in modules if name in words or name.rpartition(".")[2] in words}


def _words(code: CodeType) -> frozenset[str]:
    known = _known_words.get(id(code))
    if known is None:
        known = _known_words[id(code)] = code, frozenset(_all_words(code))
    return known[1]


_known_words: dict[int, tuple[CodeType, frozenset[str]]] = {}


def _all_words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _all_words(constant)


# Notices each import of a module of the user, and calls a function after the outermost one.


def spec_of_finders_after(
    finder: object, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """What the finders that stand behind this one in ``sys.meta_path`` find. Those before it may be
    asking it, so to ask them would never end.
    """
    place = next((at for at, one in enumerate(sys.meta_path) if one is finder), -1)
    return spec_of(sys.meta_path[place + 1 :], name, path, target)


class ImportWatch:
    """A finder for ``sys.meta_path`` that finds nothing itself.

    ``imported``: the names of the user's modules, those first whose import was complete first, so
    that a module stands behind those that it imports. ``after_each`` is called with each module as
    soon as its import is complete, ``after_import`` after each import that no other one contains.
    """

    def __init__(self) -> None:
        self.imported: list[str] = []
        self.after_each: Callable[[ModuleType], object] = lambda module: None
        self.after_import: Callable[[], object] | None = None
        self._depth = 0
        self._in_library = False

    def start(self) -> None:
        """Watch all imports from now on."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find the module, and watch its import if it is the user's."""
        spec = spec_of_finders_after(self, name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            if belongs_to_user(spec.origin or ""):
                self._watch(spec.loader)
            elif is_in_installation_folder(spec.origin or ""):
                self._watch_library(spec.loader)
        return spec

    def _watch_library(self, loader: Any) -> None:
        """What an import of an installed package changes in the process is no step's change."""
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            if self._in_library:
                load(module)
                return
            self._in_library = True
            try:
                with process_state.changed_by_import():
                    load(module)
            finally:
                self._in_library = False

        loader.exec_module = exec_module

    def _watch(self, loader: Any) -> None:
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # the module keeps its loader
            self._depth += 1
            try:
                load(module)
                if module.__name__ in self.imported:
                    self.imported.remove(module.__name__)
                self.imported.append(module.__name__)
                self.after_each(module)
            finally:
                self._depth -= 1
            if self._depth == 0 and self.after_import is not None:
                self.after_import()

        loader.exec_module = exec_module


# Gives a rank the user's modules as the caller has them, for the time of one piece of work.

watch = ImportWatch()
"""It watches the imports of this process, if the process is a rank."""


class ModulesOfWork:
    """The state of the user's modules on this rank during one piece of work.

    ``compared``: the modules that the caller has compared with a fresh import. ``failed``: module
    -> why it could not be compared. ``not_compared``: others that the work has imported. ``known``:
    what the modules held after the last work, so that they need not be described again.
    """

    known = Description()

    def __init__(self, compared: frozenset[str], failed: Mapping[str, str]) -> None:
        self.not_compared: tuple[str, ...] = ()
        self._compared = compared
        self._failed = failed
        self._working = self._imports_while_working = False
        self._edits: Mapping[str, list[Edit]] = {}
        self._undo: dict[str, Callable[[], None]] = {}
        self._before = Description()

    def begin(self, edits: Mapping[str, list[Edit]]) -> None:
        """Edit the modules that are imported now, and each other one as soon as it is imported."""
        self._edits = edits
        if not edits and ModulesOfWork.known.nodes.keys() >= set(self._imported()):
            self._before = ModulesOfWork.known  # else an import may have changed earlier ones
        ModulesOfWork.known = Description()
        self._after_import()
        self._working = True
        watch.after_import = self._after_import

    def end(self) -> bool:
        """Take back all edits, and all that the work has changed in the modules.

        Returns False if that cannot be done.
        """
        watch.after_import = None
        restored = self._restore()
        for undo in reversed(self._undo.values()):
            try:
                undo()
            except Exception:  # the work may have left anything in place of what was edited
                restored = False
        if not self._undo:
            ModulesOfWork.known = self._before
        return restored

    def _after_import(self) -> None:
        new = [name for name in self._imported() if name not in self._before.nodes]
        for name in self._failed.keys() & set(new):
            raise RuntimeError(
                f"{name} can be imported on a rank, but not in a process that is no rank "
                f"({self._failed[name]}), so it is not known what your process has changed in it"
            )
        if self._working:
            self._imports_while_working |= bool(new)
            self.not_compared += tuple(name for name in new if name not in self._compared)
        for name in new:
            if name in self._edits:
                module = sys.modules[name]
                self._undo[name] = difference.apply(module, self._edits[name])
        for name in new:
            self._before.add(sys.modules[name])

    def _imported(self) -> list[str]:
        names = watch.imported  # a module may have put another object in its own place
        return [name for name in names if isinstance(sys.modules.get(name), ModuleType)]

    def _restore(self) -> bool:
        if not self._before.nodes:
            return True
        modules = [sys.modules.get(name) for name in self._before.nodes]
        after = describe([module for module in modules if module is not None])
        if after.nodes == self._before.nodes:
            return True
        if self._imports_while_working:
            return False  # perhaps an import has filled a registry, which must stay as it is
        try:
            changed = difference.differences(wanted=self._before, present=after)
            by_module: dict[str, list[Edit]] = {}
            for one in changed:
                edit = difference.from_description(one)
                by_module.setdefault(one.path[0], []).append(edit)
            for name, edits in by_module.items():
                difference.apply(sys.modules[name], edits)
        except Exception:
            return False
        again = describe([sys.modules[name] for name in self._before.nodes])
        return again.nodes == self._before.nodes
