"""The plugin's options and markers, and the settings of runs and tests that follow from them."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.settings import RIGHT_TRIAL_SECONDS
from ddp_equivalence.ranks.backend_names import BACKENDS, LANES
from ddp_equivalence.report.text import require_writable_file, require_writable_folder, width_of

MARGIN_OF_PYTEST = len("E   ")
"""Columns that pytest puts before every line of a failure."""

ABOVE_0 = "a number of seconds above 0"


def _seconds(text: str, or_none: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if right := _right_seconds(value, or_none):
        raise argparse.ArgumentTypeError(f"it is {text}; it should be {right}")
    return value


def _right_seconds(value: Any, or_none: bool) -> str:
    """Says what would be right instead of the value; "" if it is. ``or_none``: it may be 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (0 < value < math.inf or (or_none and value == 0)):
        return ""
    return RIGHT_TRIAL_SECONDS if or_none else ABOVE_0


def add_options(parser: pytest.Parser) -> None:
    """Add all options of the plugin."""
    add = parser.getgroup(
        "ddp_equivalence", "ddp_equivalence: compared with one big batch"
    ).addoption

    def seconds(name: str, help_: str, default: float | None = None, type_: Any = _seconds) -> None:
        add(name, type=type_, default=default, metavar="SECONDS", help=help_)

    add(
        "--ddp-backend",
        choices=BACKENDS,
        default="auto",
        help="backend of the ranks; auto takes NCCL if there is a GPU, which ranks share if there "
        "are too few (nccl_shared), and gloo on the CPU otherwise",
    )
    seconds("--ddp-deadline", "time that the ranks of one check get (default 60)", 60.0)
    seconds("--ddp-collective-deadline", "time that one collective gets (default: half of that)")
    seconds(
        "--ddp-run-deadline",
        "time that the whole run gets; tests that have not started by then do not run, and the run "
        "fails (default: no limit)",
    )
    seconds(
        "--ddp-trial-seconds",
        "the time that a check may take to try small edits of a step that differs without a known "
        "cause, and so to find the line to change; 0: none are tried; default %(default)g",
        settings.Settings.trial_seconds,
        partial(_seconds, or_none=True),
    )
    for name, help_ in SWITCHES.items():
        add(name, action="store_true", help=help_)
    add(
        "--plant",
        metavar="NAME",
        help="break training in a known way in every test (sum_not_mean, rank_left_out ...; "
        "`ddp-equivalence faults --list` lists all) and list the tests that do not notice",
    )
    _add_options_of_results(add)


def _add_options_of_results(add: Callable[..., None]) -> None:
    add(
        "--must-run",
        action="append",
        choices=LANES,
        default=[],
        metavar="LANE",
        help=f"fail unless something was compared on this lane ({', '.join(LANES)}); "
        "nccl and nccl_shared also forbid falling back to gloo on the CPU; may be repeated",
    )
    add("--ddp-json", type=Path, metavar="PATH", help="write the results to this file, as JSON")
    add(
        "--ddp-export-repro",
        type=Path,
        metavar="DIR",
        help="for every check that differs in a failing test, write one plain torch script that "
        "shows the difference without this package, for a bug report",
    )
    # For ``ddp-equivalence run`` and ``record``.
    add("--ddp-repeat-with", default="pytest", help=argparse.SUPPRESS)
    add("--ddp-record", type=Path, help=argparse.SUPPRESS)
    add("--ddp-lines", type=Path, help=argparse.SUPPRESS)
    add("--ddp-lines-of", default="", help=argparse.SUPPRESS)


SWITCHES = {
    "--fresh-ranks": "start new processes for every check; by default checks share ranks that stay "
    "alive",
    "--in-process": "run rank 0 in the process of the test, without a deadline: breakpoint() works "
    "in a step",
    "--ddp-allow-changes": "do not fail a check because its step changes the process (seed, "
    "environment, default dtype, threads left running ...); the changes are undone in any case",
    "--ddp-no-second-look": "run each step only once. By default a step that hung or was aborted "
    "runs again on fresh ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL, and a step that differs runs "
    "again while it is watched",
    "--ddp-full": "report all that is known of a difference, also the causes that were ruled out; "
    "by default a report fits on one screen",
    "--ddp-github": "print an annotation for GitHub Actions for every failing check, at the line "
    "of the code that its report points at",
    # For ``ddp-equivalence run``, and the last one for ``record`` too.
    "--ddp-require-comparison": argparse.SUPPRESS,
    "--ddp-suite-run": argparse.SUPPRESS,
    "--ddp-plan": argparse.SUPPRESS,
    "--ddp-pairwise": argparse.SUPPRESS,
}
"""The options without a value, with their help."""


def check_options(config: pytest.Config) -> None:
    """Raises UsageError for options that cannot be right, before anything runs."""
    deadline = config.getoption("--ddp-deadline")
    of_collective = config.getoption("--ddp-collective-deadline")
    if of_collective is not None and of_collective >= deadline:
        raise pytest.UsageError(
            f"--ddp-collective-deadline is {of_collective:g}; it should be below "
            f"--ddp-deadline, which is {deadline:g}"
        )
    if config.getoption("--in-process") and config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "--in-process should be left out with -n: the workers of xdist have no terminal"
        )
    if hasattr(config, "workerinput"):
        return  # the controller has checked the paths
    try:
        require_writable_file("--ddp-json", config.getoption("--ddp-json"))
        require_writable_folder("--ddp-export-repro", config.getoption("--ddp-export-repro"))
    except BadCase as error:
        text = f"{error.field} is {error.value}; it should be {error.right}"
        raise pytest.UsageError(text) from error


def settings_of_run(config: pytest.Config, run_until: float | None) -> settings.Settings:
    """The settings of a run, from its options. ``run_until``: its end by ``time.monotonic()``."""
    option = config.getoption
    widest = settings.Settings.width + MARGIN_OF_PYTEST
    return settings.Settings(
        backend=option("--ddp-backend"),
        deadline=option("--ddp-deadline"),
        collective_deadline=option("--ddp-collective-deadline"),
        run_until=run_until,
        fresh_ranks=option("--fresh-ranks"),
        in_process=option("--in-process"),
        allow_changes=option("--ddp-allow-changes"),
        second_look=not option("--ddp-no-second-look"),
        trial_seconds=option("--ddp-trial-seconds"),
        must_run=tuple(option("--must-run")),
        width=width_of(sys.stdout, widest) - MARGIN_OF_PYTEST,
        full_report=option("--ddp-full"),
        full_report_with="--ddp-full",
    )


def settings_of_test(item: pytest.Item, of_run: settings.Settings) -> settings.Settings:
    """The settings of the run, changed by the test's own markers; the nearest marker wins."""
    command = item.config.getoption("--ddp-repeat-with")
    file, colons, test = item.nodeid.partition("::")  # as from the root folder of pytest
    file = os.path.relpath(item.config.rootpath / file, item.config.invocation_params.dir)
    of_test = replace(of_run, repeat=f'{command} "{file}{colons}{test}"')
    for marker in reversed(list(item.iter_markers("ddp"))):  # the nearest marker comes last
        of_test = replace(of_test, **marker.kwargs)
    return of_test


# The plugin's markers, and what their arguments may be.

MARKERS = (
    "gloo_fallback: runs on gloo and the CPU because there is no GPU for NCCL",
    "gloo: runs on gloo and the CPU because gloo was chosen",
    "gloo_cuda: runs on gloo with CUDA tensors",
    "nccl: runs on an NCCL backend, one rank per GPU",
    "nccl_shared: runs on NCCL whose ranks share GPUs, because there are too few",
    "emulated: one process on the CPU does what nn.DataParallel does on several GPUs",
    "data_parallel: runs the real nn.DataParallel on two or more GPUs",
    "data_parallel_shared: runs the real nn.DataParallel with several replicas on one GPU",
    "difference: the case is known to differ from one big batch",
    "ddp(deadline, collective_deadline, fresh_ranks, in_process, allow_changes, second_look, "
    "trial_seconds): settings of the checks made by this test",
    "self_check: checks made by this test are left out of the closing table",
    "planted_fault(name): the table counts checks made by this test as plantings of this fault",
    "trial(strategy, layout, lane): one case of the catalogue, for the closing table",
)

BOOLEANS = ("fresh_ranks", "in_process", "allow_changes", "second_look")
TIMES = ("deadline", "collective_deadline", "trial_seconds")


def check_markers(item: pytest.Item) -> None:
    """Raises UsageError for a marker of the test whose arguments cannot be right."""
    for marker in item.iter_markers():
        right = ""
        if marker.name == "ddp":
            right = _right_settings(marker)
        elif marker.name == "planted_fault":
            from ddp_equivalence.faults import FAULTS

            if len(marker.args) != 1 or marker.args[0] not in list(FAULTS):
                right = "the name of one fault, such as sum_not_mean"
        elif marker.name == "trial" and len(marker.args) != 3:
            right = "strategy, layout and lane"
        if right:
            given = [repr(value) for value in marker.args]
            given += [f"{name}={value!r}" for name, value in marker.kwargs.items()]
            written = f"{item.nodeid}: @pytest.mark.{marker.name}({', '.join(given)})"
            raise pytest.UsageError(f"{written} should have {right}")


def _right_settings(marker: pytest.Mark) -> str:
    """Says what would be right instead of the arguments of ``@pytest.mark.ddp``; "" if they are."""
    given = marker.kwargs
    if marker.args or given.keys() - {*TIMES, *BOOLEANS}:
        return f"name=value with one of {', '.join((*TIMES, *BOOLEANS))}"
    for name, value in given.items():
        if name in BOOLEANS and not isinstance(value, bool):
            return f"True or False for {name}"
        if name in TIMES and (right := _right_seconds(value, name == "trial_seconds")):
            return f"{right} for {name}"
    if given.get("collective_deadline", 0) >= given.get("deadline", math.inf):
        return "a collective_deadline below the deadline"
    return ""


# ``pytest --ddp-run-deadline SECONDS``: after this time no test starts, and the run fails.

END = "DDP_EQUIVALENCE_RUN_UNTIL"
"""The environment variable in which the controller of xdist hands ``end`` to its workers."""


class RunDeadline:
    """Registered for a run with a deadline. ``end``: the deadline by ``time.monotonic()``."""

    def __init__(self, config: pytest.Config) -> None:
        self._seconds: float = config.getoption("--ddp-run-deadline")
        is_worker = hasattr(config, "workerinput")
        inherited = os.environ.get(END) if is_worker else None
        self.end = float(inherited) if inherited else time.monotonic() + self._seconds
        if not is_worker:
            os.environ[END] = str(self.end)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() <= self.end:
            return None
        item.session.shouldfail = (
            f"--ddp-run-deadline: the {self._seconds:g} s of this run are over"
        )
        return True  # this tells pytest not to run the test itself
