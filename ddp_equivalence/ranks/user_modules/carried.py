"""Finds what the caller has changed in the user's modules since they were imported."""

from __future__ import annotations

import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.ranks.importable import imported_user_modules
from ddp_equivalence.ranks.process_state import IGNORED_VARIABLES, environment_variables
from ddp_equivalence.ranks.user_modules import paths
from ddp_equivalence.ranks.user_modules.description import Description, describe
from ddp_equivalence.ranks.user_modules.differences import (
    CONTENTS,
    DELETE,
    SET_IT,
    Difference,
    Edit,
    differences,
)
from ddp_equivalence.ranks.user_modules.fresh_import import FreshImport, Request, import_freshly
from ddp_equivalence.ranks.user_modules.nodes import (
    CLASS,
    FUNCTION,
    KEPT,
    MANY,
    NAMED,
    Node,
)
from ddp_equivalence.ranks.user_modules.paths import Path

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
        value = paths.read_or_missing(module, one.path[1:]) if one.action != DELETE else None
        if not _can_travel(one, value, now):
            continue
        if one.action == CONTENTS:
            value = paths.contents(value)
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
            if not replaced.intersection(paths.prefixes(path)) or path in contents
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
        raise BadCase("step", paths.text(one.path), right)
    if one.wanted is not None and one.wanted[0] == KEPT:
        if _is_private_to_a_library(one.path, module):
            return False
        right = (
            f"a value that can be pickled, since the module is not like this in a new import; "
            f"the ranks import {module.__name__}, and cannot be sent this {type(value).__name__}"
        )
        raise BadCase("step", paths.text(one.path), right)
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
    if kind not in (paths.FIELD, paths.SLOT) or not str(name).startswith("_"):
        return False
    owner = paths.read_or_missing(module, path[1:-1])
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
