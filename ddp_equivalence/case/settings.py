"""Defaults that a run sets once for all its checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Defaults of ``check`` for a run.

    ``deadline``: seconds of a case, ``collective_deadline`` of one collective (None: half of the
    case's), ``run_until`` of the whole run, on the machine's monotonic clock. ``second_look``: run
    a case that hung, was aborted or differed once more. ``repeat``: the command that repeats what
    runs now. ``plant``: the fault that is planted in every step; "" for none. ``width``: of
    reports, in columns.
    """

    backend: str = "auto"
    deadline: float = 60.0
    collective_deadline: float | None = None
    run_until: float | None = None
    fresh_ranks: bool = False
    in_process: bool = False
    allow_changes: bool = False
    second_look: bool = True
    must_run: tuple[str, ...] = ()
    repeat: str = ""
    plant: str = ""
    width: int = 96


_settings: list[Settings] = [Settings()]


def current() -> Settings:
    """The settings in force."""
    return _settings[-1]


def replaced(**changes: Any) -> Settings:
    """The settings in force with some of them changed."""
    return replace(_settings[-1], **changes)


@contextmanager
def using(new: Settings) -> Iterator[None]:
    """Use these settings for all checks inside."""
    _settings.append(new)
    try:
        yield
    finally:
        _settings.pop()
