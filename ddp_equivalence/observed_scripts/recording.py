"""Lets the ranks of a script run until they have recorded their steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_equivalence.observed_scripts.how_it_ended import Ending, where_ranks_are
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

    def first(self) -> tuple[Record, bool, Ending | None]:
        """The record of the steps, whether it was made in float64, and how the script ended if it
        did not make all of them. Raises ScriptFailed.
        """
        tries = {"auto": (True, False), "float64": (True,), "own": (False,)}
        found: list[tuple[Record, bool, Ending | None]] = []
        for float64 in tries[self._options.precision]:
            record, end = self._run(float64=float64)
            found.append((record, float64, end))
            if record.steps and (end is None or not end.code):
                break
        best = max(found, key=lambda one: len(one[0].steps))
        if not best[0].steps:
            raise _failed(record, end)
        return best

    def again(self, **told: Any) -> Record:
        """Another record. ``told``: fields of ``Told``.

        Raises ScriptFailed.
        """
        record, why = self._run(**told)
        if not record.steps:
            raise _failed(record, why)
        return record

    def _run(self, **more: Any) -> tuple[Record, Ending | None]:
        """The record, and how the script ended before it had made the steps, if it did."""
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
            hangs = code is None and not _all_done(folder)
            places = where_ranks_are(Record(folder)) if hangs else {}
        finally:
            running.end()
        record = Record(folder)
        made = record.steps_by_rank
        if len(record.steps) >= replace(told, **more).steps or _all_done(folder):
            return record, None
        words = running.last_words
        return record, Ending(code, options.deadline, options.steps, made, words, places)


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


def _failed(record: Record, end: Ending | None) -> ScriptFailed:
    """Says why no step was made by all ranks."""
    assert end is not None
    what = f"did not make {end.asked} steps of an optimizer within {end.seconds:g} s{end.places}"
    if end.code is not None:
        made = "had made the steps that were to be recorded"
        what = f"ended with exit code {end.code} before every rank {made}"
    alone = ""
    if done := _ranks_that_are_done(record):
        alone = (
            f" Only {rank_names(done)} made them. If one rank trains something alone at first, "
            "such as a teacher, let it do that in a run of its own before this one."
        )
    return ScriptFailed(f"The command {what}.{alone} It printed last:\n{end.printed}")
