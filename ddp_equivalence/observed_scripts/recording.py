"""Lets the ranks of a script run until they have recorded their steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_equivalence.observed_scripts.launch import Running
from ddp_equivalence.observed_scripts.options import Options
from ddp_equivalence.observed_scripts.record import Record
from ddp_equivalence.observed_scripts.recorded_step import rank_folder
from ddp_equivalence.observed_scripts.told import Told
from ddp_equivalence.observed_scripts.working_folder import copy_of_links, with_own_scripts
from ddp_equivalence.report.wrapping import rank_names

SECONDS_TO_END = 3.0
"""A launcher gets this long to end by itself when its ranks have ended."""


class ScriptFailed(RuntimeError):
    """The script ended, or took too long, before it had made the steps to record."""


class Recording:
    """``command``: trains on the ranks. ``scratch``: a folder for everything that is written."""

    def __init__(self, command: Sequence[str], options: Options, scratch: Path) -> None:
        self._command, self._options, self._scratch = tuple(command), options, scratch

    def first(self) -> tuple[Record, bool]:
        """The record of the steps, and whether it was made in float64. Raises ScriptFailed."""
        tries = {"auto": (True, False), "float64": (True,), "own": (False,)}
        why = ""
        for float64 in tries[self._options.precision]:
            record, why = self._run(float64=float64)
            if record.steps:
                return record, float64
        raise ScriptFailed(why)

    def again(self, **told: Any) -> Record:
        """Another record. ``told``: fields of ``Told``.

        Raises ScriptFailed.
        """
        record, why = self._run(**told)
        if not record.steps:
            raise ScriptFailed(why)
        return record

    def _run(self, **more: Any) -> tuple[Record, str]:
        """The record, and why it is too short, if it is."""
        options = self._options
        folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=self._scratch))
        at = working_folder(options, folder)
        told = Told(
            role="record",
            folder=str(folder),
            first_step=options.from_step,
            steps=options.steps,
            without_dropout=not options.dropout,
            devices_on_cpu=options.as_cpu,
            working_folder="" if options.in_place else str(at),
            plant=options.plant,
        )
        command = with_own_scripts(self._command, Path(options.folder))
        running = Running(command, replace(told, **more), at, folder / "record.log")
        record = Record(folder)
        try:
            while running.exit_code is None and not _all_done(folder):
                if time.monotonic() - running.started > options.deadline:
                    break
                time.sleep(0.02)
            ended = time.monotonic() + SECONDS_TO_END
            while running.exit_code is None and _all_done(folder) and time.monotonic() < ended:
                time.sleep(0.01)
            code = running.exit_code
        finally:
            running.end()
        record = Record(folder)
        if record.steps:
            return record, ""
        return record, _why_not(code, running.last_words, options, _ranks_that_are_done(record))


def working_folder(options: Options, beside: Path) -> Path:
    """Where a command runs: in the user's folder, or in a new copy of it made of links."""
    if options.in_place:
        return Path(options.folder)
    copy = beside / "working_folder"
    copy_of_links(Path(options.folder), copy)
    return copy


def _all_done(folder: Path) -> bool:
    record = Record(folder)
    return len(_ranks_that_are_done(record)) == record.world_size > 0


def _ranks_that_are_done(record: Record) -> list[int]:
    """The ranks that have made the steps which were to be recorded."""
    ranks = range(record.world_size)
    return [rank for rank in ranks if (rank_folder(record.folder, rank) / "done").exists()]


def _why_not(code: int | None, last_words: str, options: Options, done: Sequence[int]) -> str:
    """Why too little was recorded, in words. ``done``: the ranks that made all steps."""
    end = f"did not make {options.steps} steps of an optimizer within {options.deadline:g} s"
    if code is not None:
        made = "had made the steps that were to be recorded"
        end = f"ended with exit code {code} before every rank {made}"
    alone = ""
    if done:
        alone = (
            f" Only {rank_names(done)} made them. If one rank trains something alone at first, "
            "such as a teacher, let it do that in a run of its own before this one."
        )
    return f"The command {end}.{alone} It printed last:\n{last_words}"
