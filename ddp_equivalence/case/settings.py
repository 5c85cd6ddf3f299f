"""Settings that hold for all checks of a run. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

RIGHT_TRIAL_SECONDS = "a number of seconds, or 0 for no trials of edits"
"""The right values of ``trial_seconds``, for errors."""


@dataclass(frozen=True)
class Settings:
    """The values that ``check`` uses where its caller gives no argument."""

    backend: str = "auto"
    """The backend of the ranks. "auto" is NCCL if there is a GPU, which ranks share if there are
    too few, and gloo on the CPU otherwise."""
    deadline: float = 60.0
    """Seconds after which a case is stopped."""
    collective_deadline: float | None = None
    """Seconds after which one collective is stopped. None stands for half of ``deadline``."""
    run_until: float | None = None
    """The time at which the whole run must end, on the machine's monotonic clock."""
    fresh_ranks: bool = False
    """Every check starts new processes; otherwise checks reuse them."""
    in_process: bool = False
    """Rank 0 works in the calling process, without a deadline, so that breakpoint() works."""
    allow_changes: bool = False
    """A step may leave its process changed: its seed, environment, default dtype or threads."""
    second_look: bool = True
    """A case that hung, was aborted or differed is run once more, to find out more."""
    trial_seconds: float = 8.0
    """The time for trying small edits of a step that differs without a known cause; 0: none."""
    must_run: tuple[str, ...] = ()
    """Lanes on which the run must compare something. With "nccl" or "nccl_shared", gloo on the CPU
    may not replace NCCL."""
    give_up_lanes: bool = False
    """Ranks on GPUs that have failed to start, and have never started, are not started again."""
    compared_by_ranks: bool | None = None
    """Each rank compares its own gradients with the true ones, or it sends them. None: the size of
    the model decides."""
    repeat: str = ""
    """The command that repeats the check. Reports print it."""
    plant: str = ""
    """The name of the fault that is planted in every step; "" for none."""
    width: int = 96
    """The width of reports, in columns."""
    full_report: bool = False
    """Reports of differences hold everything that is known, and not one screen of it."""
    full_report_with: str = "verdict.full_report()"
    """The option that asks for it. Short reports print it."""


_settings: list[Settings] = [Settings()]
"""The last entry is in force. Each ``using`` adds an entry while its block runs."""


def current() -> Settings:
    """The settings in force."""
    return _settings[-1]


def replaced(**changes: Any) -> Settings:
    """A copy of the settings in force with these fields changed."""
    return replace(_settings[-1], **changes)


@contextmanager
def using(new: Settings) -> Iterator[None]:
    """Inside the block, all checks use the settings ``new``."""
    _settings.append(new)
    try:
        yield
    finally:
        _settings.pop()
