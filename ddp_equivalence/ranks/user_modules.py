"""Brings the ranks' imports of the user's modules into the state in which the caller has them.

A function of an importable module travels as its name, so a rank imports its module anew. What the
caller has set there since the module was imported would be lost. So a fresh process imports the
same modules, the caller compares its own with them, and sends what differs; the ranks apply it.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from multiprocessing.connection import Connection
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch.multiprocessing as multiprocessing

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks import module_contents, process_state, process_tree
from ddp_equivalence.ranks.importable import (
    belongs_to_user,
    imported_user_modules,
    is_in_installation_folder,
    is_user_module,
    spec_of,
)
from ddp_equivalence.ranks.module_contents import (
    ATTRIBUTE,
    CLASS,
    FUNCTION,
    HELD,
    KEPT,
    Contents,
    Difference,
    Edit,
    Leaf,
    Path,
    Row,
    Rows,
    Step,
)
from ddp_equivalence.ranks.process_state import IGNORED_VARIABLES, Surroundings
from ddp_equivalence.ranks.process_tree import children_allowed
from ddp_equivalence.ranks.server import (
    empty_main_module,
    release_server,
    start_method,
    start_server,
)

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
    surroundings: Surroundings


@dataclass(frozen=True)
class FreshImport:
    """``rows``: of the modules, those first that others import. ``failed``: name -> error.

    ``alone``: what each module held when its own import was complete. Where it is something else, a
    later import has changed the module, as it does a registry of functions.
    """

    rows: Rows
    failed: Mapping[str, str]
    alone: Rows


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
            right = (
                f"in modules that can be imported within {LONGEST:g} s: {names} cannot, so that "
            )
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
    with suppress(OSError):
        request.surroundings.adopt({})
    watch, alone = ImportWatch(), Contents()

    def describe_alone(module: ModuleType) -> None:
        if module.__name__ in request.described and is_user_module(module):
            alone.add(module)

    watch.after_each = describe_alone
    watch.start()
    failed: dict[str, str] = {}
    for name in request.names:
        try:
            import_module(name)
        except BaseException as error:  # SystemExit too
            failed[name] = f"{type(error).__name__}: {error}"
    modules = [sys.modules[name] for name in watch.imported if name in request.described]
    contents = Contents(filter(is_user_module, modules))
    sender.send(FreshImport(contents.rows, failed, alone.rows))
    sender.close()
    os._exit(0)


# Finds what the caller has changed in the user's modules since they were imported.

MAX_KNOWN = 64
"""The results of at most this many fresh imports are kept."""


@dataclass(frozen=True)
class Changes:
    """``edits``: what makes a fresh import like the caller's modules.

    ``compared``: the modules that were compared. ``failed``: module -> why it could not be imported
    for that. ``places``: the id of an object -> the path at which a fresh import has it too.
    ``imports``: what a rank must import, in this order, before anything is unpickled.
    """

    compared: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)
    edits: Sequence[Edit] = ()
    places: Mapping[int, Path] = field(default_factory=dict)
    imports: Sequence[str] = ()


NO_CHANGES = Changes()

_known: OrderedDict[object, tuple[FreshImport, Mapping[str, object]]] = OrderedDict()
"""(Modules, environment) -> their fresh import, and the files that it has read."""

_versions: dict[str, tuple[object, object]] = {}
"""Module -> its file and its rows after its own import, in the latest fresh one."""

_version = 0


def version() -> int:
    """A number that grows whenever a fresh import of a module gives something else than before.

    Ranks that imported the module earlier then have an outdated one.
    """
    return _version


def changes_in(needed: Iterable[str], codes: Iterable[CodeType]) -> Changes:
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
        now = Contents(modules[name] for name in fresh.rows if name in modules)
        found = list(module_contents.differences(wanted=now.rows, present=fresh.rows))
        leaves = [
            one.wanted.items[step]
            for one in found
            for step in one.steps
            if step in one.wanted.items
        ]
        words = {word for leaf in leaves for word in _words_of(leaf, now.rows, set())}
        more = _mentioned(now.codes, modules) | (words & modules.keys())
        if more <= names | fresh.rows.keys():
            return _changes(found, now, fresh, [name for name in modules if name in names])
        names |= more - fresh.rows.keys()


def notice(imported: Iterable[str]) -> bool:
    """Compare these modules too from now on, since work on ranks has imported them.

    No name in the code told so. Returns True if that work should have been sent changes of them.
    """
    new = set(imported) & imported_user_modules().keys()
    _noticed.update(new)
    return bool(new and changes_in(new, ()).edits)


_noticed: set[str] = set()


def _words_of(leaf: Any, rows: Rows, seen: set[Path]) -> Iterator[str]:
    """All words in the description of an object, among them the modules that may have made it."""
    if isinstance(leaf, str):
        yield leaf
    elif isinstance(leaf, tuple):
        for part in leaf:
            yield from _words_of(part, rows, seen)
        if leaf[:1] == (HELD,) and leaf[1] not in seen:
            seen.add(leaf[1])
            row: Row = rows[leaf[1][0]][leaf[1]]
            for held in row.items.values():
                yield from _words_of(held, rows, seen)


def _changes(
    found: Iterable[Difference], now: Contents, fresh: FreshImport, names: Sequence[str]
) -> Changes:
    """``names``: what the fresh process imported, in this order."""
    edits = [edit for edit in map(_edit, found) if edit is not None]
    places = {
        number: path
        for number, path in now.places.items()
        if (row := fresh.rows[path[0]].get(path)) and row.about == now.rows[path[0]][path].about
    }
    edited = {edit.path[0] for edit in edits}
    if all(fresh.alone.get(name) == rows for name, rows in fresh.rows.items()):
        names = []  # none fills another, so the order in which they are imported does not matter
    return Changes(
        compared=frozenset(now.rows),
        failed=fresh.failed,
        edits=edits,
        places=places,
        imports=[
            name
            for name in dict.fromkeys((*names, *fresh.rows))
            if name in {*names, *edited} - fresh.failed.keys()
        ],
    )


def _edit(one: Difference) -> Edit | None:
    """Raises BadCase for what cannot be sent. None if nothing of it is a change of the caller's."""
    module = sys.modules[one.path[0]]
    now = module_contents.held(module_contents.read(module, one.path[1:]))
    values = {step: now[step] for step in one.steps if step in now}
    stay = [step for step, value in values.items() if not _can_travel(one, step, value, module)]
    if stay and len(stay) == len(one.steps):
        return None
    values = {step: value for step, value in values.items() if step not in stay}
    return Edit(one.path, tuple(one.wanted.items), values)


def _can_travel(one: Difference, step: Step, value: Any, module: ModuleType) -> bool:
    """False for what is no change of the caller's. Raises BadCase for what cannot be sent."""
    path, wanted = (*one.path, step), one.wanted.items[step]
    if _is_stale(wanted, one.present.items.get(step), value, module):
        if type(module.__loader__) is not SourceFileLoader:
            return False  # a loader such as pytest's changes the code of what it imports
        right = (
            f"the code in {module.__file__}, which the ranks import; the file is no longer what "
            "this process has imported: reload the module, or start again"
        )
        raise BadCase("step", module_contents.text(path), right)
    about = _about(wanted)
    if about and about[0] == KEPT:
        if _is_private_to_a_library(path, module):
            return False
        right = (
            f"a value that can be pickled, since the module is not like this in a new import; "
            f"the ranks import {module.__name__}, and cannot be sent this {type(value).__name__}"
        )
        raise BadCase("step", module_contents.text(path), right)
    return True


def _about(leaf: Leaf | None) -> tuple[Any, ...]:
    return leaf[2] or () if leaf is not None and leaf[0] == HELD else ()


def _is_stale(new: Leaf, old: Leaf | None, value: Any, module: ModuleType) -> bool:
    """True if the module's own function or class has other code than in a fresh import."""
    wanted, present = _about(new), _about(old)
    if not wanted or wanted == present or wanted[:3] != present[:3]:  # kind, module and name
        return False
    if wanted[0] == FUNCTION and isinstance(value, FunctionType):
        return value.__code__.co_filename == module.__file__
    return bool(wanted[0] == CLASS) and value.__module__ == module.__name__


def _is_private_to_a_library(path: Path, module: ModuleType) -> bool:
    """True for a private attribute of an object whose class belongs to an installed package."""
    kind, name = path[-1]
    owner = module_contents.read(module, path[1:-1])
    if kind != ATTRIBUTE or not name.startswith("_") or isinstance(owner, ModuleType | type):
        return False
    return type(owner).__module__.partition(".")[0] not in {
        one.partition(".")[0] for one in imported_user_modules()
    }


def _freshly_imported(
    names: frozenset[str], modules: Mapping[str, ModuleType]
) -> FreshImport | None:
    """What a fresh import of these modules gives, as found now or earlier."""
    surroundings = Surroundings.here()
    ignored = tuple(map(os.fsencode, IGNORED_VARIABLES))
    variables = {
        item for item in surroundings.environment.items() if not item[0].startswith(ignored)
    }
    key = names, frozenset(variables)
    files = {name: _file(module) for name, module in modules.items()}
    fresh, read = _known.get(key, (None, {}))
    if fresh is not None and all(files.get(name, file) == file for name, file in read.items()):
        _known.move_to_end(key)
        _note_versions(fresh, read)
        return fresh
    request = Request(
        names=[name for name in modules if name in names],  # as this process imported them
        described=frozenset(modules),
        surroundings=surroundings,
    )
    fresh = import_freshly(request)
    if fresh is not None:
        _known[key] = fresh, {name: files[name] for name in fresh.rows}
        while len(_known) > MAX_KNOWN:
            _known.popitem(last=False)
        _note_versions(*_known[key])
    return fresh


def _note_versions(fresh: FreshImport, files: Mapping[str, object]) -> None:
    global _version
    for name, file in files.items():
        before, _versions[name] = _versions.get(name), (file, fresh.alone.get(name))
        _version += before not in (None, _versions[name])


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
        self._libraries: set[str] = set()

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
                _replace_exec(spec.loader, self._import_of_user)
            elif is_in_installation_folder(spec.origin or ""):
                _replace_exec(spec.loader, self._import_of_library)
        return spec

    def _import_of_library(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        """What an import of an installed package changes in the process is no step's change."""
        is_outermost = not self._libraries
        self._libraries.add(module.__name__.partition(".")[0])
        if not is_outermost:
            load(module)
            return
        try:
            with process_state.changed_by_import():
                load(module)
        finally:
            process_state.libraries.note(self._libraries)
            self._libraries = set()

    def _import_of_user(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
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


def _replace_exec(loader: Any, run: Callable[[Any, ModuleType], None]) -> None:
    """Let ``run`` execute the module, once; the module keeps its loader as it was."""
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        run(load, module)

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

    known = Contents()

    def __init__(self, compared: frozenset[str], failed: Mapping[str, str]) -> None:
        self.not_compared: tuple[str, ...] = ()
        self._compared, self._failed = compared, failed
        self._before = Contents()
        self._edited = self._imports = False

    def begin(self, edits: Sequence[Edit]) -> None:
        """Edit the modules, all of which are imported by now."""
        self._before, ModulesOfWork.known = ModulesOfWork.known, Contents()
        if self._before.rows.keys() != set(self._imported()):
            self._before = self._contents()  # an import may have changed earlier modules
        self._refuse(self._before.rows)
        self._edited = bool(edits)
        module_contents.apply(edits)
        watch.after_import = self._after_import

    def end(self) -> bool:
        """Take back all edits, and all that the work has changed in the modules.

        Returns False if that cannot be done.
        """
        watch.after_import = None
        ModulesOfWork.known, after = self._before, self._contents()
        if self._imports:  # perhaps one of them has filled a registry, which must stay as it is
            return not self._edited and after.rows == self._before.rows
        if self._edited or after.rows != self._before.rows:
            try:
                self._before.put_back()
            except Exception:  # the work may have left anything in place of what was there
                return False
            after = self._contents()
        return after.rows == self._before.rows

    def _after_import(self) -> None:
        new = [name for name in self._imported() if name not in self._before.rows]
        self._refuse(new)
        self._imports |= bool(new)
        self.not_compared += tuple(name for name in new if name not in self._compared)
        for name in new:
            self._before.add(sys.modules[name])

    def _refuse(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._failed:
                raise RuntimeError(
                    f"{name} can be imported on a rank, but not in a process that is no rank "
                    f"({self._failed[name]}), so it is not known what your process has changed in "
                    "it"
                )

    def _imported(self) -> list[str]:
        names = watch.imported  # a module may have put another object in its own place
        return [name for name in names if isinstance(sys.modules.get(name), ModuleType)]

    def _contents(self) -> Contents:
        return Contents(sys.modules[name] for name in self._imported())
