"""``observe`` runs a training script as it is, and says whether its ranks train like one process.

The script runs twice. First its ranks are recorded for a few steps. Then the same script computes
the same steps in one process, from the recorded weights, on the rows that all ranks read. If a step
differs, the ranks run once more, and are watched line by line.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from ddp_equivalence.observed_scripts.measured_step import name_of_script
from ddp_equivalence.observed_scripts.observed import Observed
from ddp_equivalence.observed_scripts.one_process import processes_in
from ddp_equivalence.observed_scripts.options import Command, ObserveOptions, Options, words_of
from ddp_equivalence.observed_scripts.plan import plan_lines
from ddp_equivalence.observed_scripts.script_observation import ScriptObservation
from ddp_equivalence.report import listeners
from ddp_equivalence.report.line import Line

DEVICES_OF_UNKNOWN = 2
"""A command that does not say how many processes it starts gets so many devices."""


def observe(command: Command, **options: Unpack[ObserveOptions]) -> Observed:
    """Run the command on its ranks and in one process, and compare what its optimizer gets.

    ``command``: starts training on several ranks of this machine, as words or as a line for a
    shell. ``options``: see ``ddp_equivalence.observed_scripts.options.Options``.

    Raises BadCase for an argument that cannot be right, and ScriptFailed if the command ends before
    it has made the steps to record.
    """
    with _observation(command, options) as observation:
        found = observation.observed()
    for verdict in found.all_verdicts:
        listeners.tell(verdict, None)
    return found


def plan(command: Command, **options: Unpack[ObserveOptions]) -> tuple[Line, ...]:
    """Run the command on its ranks only, and say what one process would be given.

    The arguments and errors are those of ``observe``.
    """
    with _observation(command, options) as observation:
        record, float64, _ = observation.recording.first()
        alone = observation.in_one_process(record)
        name = name_of_script(observation.command, record.runs[0]["main"])
        return tuple(plan_lines(record, name, alone, float64))


@contextmanager
def _observation(command: Command, given: ObserveOptions) -> Iterator[ScriptObservation]:
    """What is done, in a folder that is deleted in the end unless the user keeps it."""
    options, words = Options(**given), words_of(command, "command")
    if options.as_cpu < 0:
        options = replace(options, as_cpu=processes_in(words) or DEVICES_OF_UNKNOWN)
    if options.keep is not None:
        kept = Path(options.keep)
        kept.mkdir(parents=True)
        yield ScriptObservation(words, options, kept.resolve())
        return
    with tempfile.TemporaryDirectory(prefix="observed-", ignore_cleanup_errors=True) as folder:
        yield ScriptObservation(words, options, Path(folder).resolve())
