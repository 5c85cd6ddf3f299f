"""Captures, compares and restores the state of a process that a case could hand on to the next."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddp_equivalence.ranks import process_settings
from ddp_equivalence.ranks.left_running import current_threads

IGNORED_VARIABLES = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "CUDA_HOME",
)
"""Prefixes of variables that pytest sets, or torch when it is imported or compiles."""

MAX_VARIABLES_NAMED = 4


@dataclass(frozen=True)
class ProcessState:
    """The state of a process at one moment.

    ``settings`` (by name), ``environment`` and ``import_path`` can be restored. ``threads`` (their
    idents) cannot.
    """

    settings: Mapping[str, Any]
    environment: Mapping[bytes, bytes]
    import_path: tuple[str, ...]
    threads: frozenset[int | None]


def capture() -> ProcessState:
    """The state of this process now."""
    _reported_changes.clear()
    _variables_by_import.clear()
    _settings_by_import.clear()
    return ProcessState(
        settings=process_settings.read_all(),
        environment=environment_variables(),
        import_path=tuple(sys.path),
        threads=current_threads(),
    )


def restore(before: ProcessState) -> tuple[str, ...]:
    """Give the process its earlier state and return, as phrases, everything that had changed.

    Random generators are not restored, since all code that uses them seeds them first.
    """
    process_settings.apply(
        {
            name: before.settings[name]
            for name, value in _settings_by_import.items()
            if name in before.settings and process_settings.SETTINGS[name].read() == value
        }
    )
    changes = [
        *_reported_changes,
        *_restore_environment(before),
        *process_settings.restore(before.settings),
    ]
    if sys.path != list(before.import_path):
        sys.path[:] = before.import_path
    return tuple(changes)


def report_change(change: str) -> None:
    """Let the next ``restore`` return this change, which it could not find by itself."""
    _reported_changes.append(change)


_reported_changes: list[str] = []

_variables_by_import: dict[bytes, bytes | None] = {}
_settings_by_import: dict[str, Any] = {}
"""The variables and settings that the import of a library has changed, with their new values."""


@contextmanager
def changed_by_import() -> Iterator[None]:
    """The block imports a library. What that changes is restored, and is no change of the step."""
    variables, settings = environment_variables(), process_settings.read_all()
    try:
        yield
    finally:
        after = environment_variables()
        for name in variables.keys() | after.keys():
            if variables.get(name) != after.get(name):
                _variables_by_import[name] = after.get(name)
        for setting, value in process_settings.read_all().items():
            if settings[setting] != value:
                _settings_by_import[setting] = value


def become_a_rank() -> None:
    """Note that this process is a rank and nothing else, from now on."""
    _is_a_rank.append(True)


def is_a_rank() -> bool:
    """True if this process is a rank and nothing else, and runs no other code between cases."""
    return bool(_is_a_rank)


_is_a_rank: list[bool] = []


def keep_group(group: object) -> None:
    """Keep this process group for later work: it does not count as left behind by a step."""
    _kept_groups.append(group)


def kept_groups() -> frozenset[int]:
    """The ids of the groups that were given to ``keep_group``."""
    return frozenset(map(id, _kept_groups))


_kept_groups: list[object] = []


def environment_variables() -> dict[bytes, bytes]:
    """The environment variables of this process."""
    # os.environb checks every name and value each time, which takes 0.2 ms.
    raw: Mapping[bytes, bytes] = getattr(os.environ, "_data", os.environb)
    return dict(raw)


def set_environment(wanted: Mapping[bytes, bytes]) -> list[bytes]:
    """Give this process exactly these variables; return the sorted names of those that differed."""
    now = environment_variables()
    if now == wanted:
        return []
    names = sorted(name for name in now.keys() | wanted.keys() if now.get(name) != wanted.get(name))
    for name in names:
        if name in wanted:
            os.environb[name] = wanted[name]
        else:
            del os.environb[name]
    return names


def _restore_environment(before: ProcessState) -> list[str]:
    now = environment_variables()
    names = set_environment(before.environment)
    names = [
        name
        for name in names
        if not os.fsdecode(name).startswith(IGNORED_VARIABLES)
        and (name not in _variables_by_import or _variables_by_import[name] != now.get(name))
    ]
    changes = []
    for name in names[:MAX_VARIABLES_NAMED]:
        old, new = before.environment.get(name), now.get(name)
        verb = "set" if old is None else "removed" if new is None else "changed"
        changes.append(f"environment variable {os.fsdecode(name)} {verb}")
    if len(names) > MAX_VARIABLES_NAMED:
        changes.append(f"{len(names) - MAX_VARIABLES_NAMED} more environment variables changed")
    return changes
