"""The plugin's options and markers, and the settings of runs and tests that follow from them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.case.settings import RIGHT_TRIAL_SECONDS
from ddp_equivalence.ranks.backend_names import BACKENDS, LANES
from ddp_equivalence.report.text import FILE, FOLDER, why_no_file, why_no_folder, width_of

MARGIN_OF_PYTEST = len("E   ")
"""Columns that pytest puts before every line of a failure."""


def add_options(parser: pytest.Parser) -> None:
    """All options of the plugin."""
    group = parser.getgroup("ddp_equivalence", "ddp_equivalence: compared with one big batch")
    _add_options_of_ranks(group)
    _add_options_of_checks(group)
    _add_options_of_results(group)


def _add_options_of_ranks(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--ddp-backend",
        choices=BACKENDS,
        default="auto",
        help="backend of the ranks; auto takes NCCL if there is a GPU, which ranks share if there "
        "are too few (nccl_shared), and gloo on the CPU otherwise",
    )
    group.addoption(
        "--ddp-deadline",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="time that the ranks of one check get (default 60)",
    )
    group.addoption(
        "--ddp-collective-deadline",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="time that one collective gets (default: half the time of the check)",
    )
    group.addoption(
        "--ddp-run-deadline",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="time that the whole run gets; tests that have not started by then do not run, and "
        "the run fails (default: no limit)",
    )
    group.addoption(
        "--fresh-ranks",
        action="store_true",
        help="start new processes for every check; by default checks share ranks that stay alive",
    )
    group.addoption(
        "--in-process",
        action="store_true",
        help="run rank 0 in the process of the test, without a deadline: breakpoint() works in a "
        "step",
    )


def _add_options_of_checks(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--ddp-allow-changes",
        action="store_true",
        help="do not fail a check because its step changes the process (seed, environment, "
        "default dtype, threads left running ...); the changes are undone in any case",
    )
    group.addoption(
        "--ddp-no-second-look",
        action="store_true",
        help="run each step only once. By default a step that hung or was aborted runs again on "
        "fresh ranks with TORCH_DISTRIBUTED_DEBUG=DETAIL, and a step that differs runs again while "
        "it is watched",
    )
    group.addoption(
        "--ddp-trial-seconds",
        type=_seconds_or_none,
        default=settings.Settings.trial_seconds,
        metavar="SECONDS",
        help="the time that a check may take to try small edits of a step that differs without a "
        "known cause, and so to find the line to change; 0: none are tried; default %(default)g",
    )
    group.addoption(
        "--plant",
        metavar="NAME",
        help="break training in a known way in every test (sum_not_mean, rank_left_out ...; "
        "`ddp-equivalence faults --list` lists all) and list the tests that do not notice",
    )


def _add_options_of_results(group: pytest.OptionGroup) -> None:
    group.addoption(
        "--must-run",
        action="append",
        choices=LANES,
        default=[],
        metavar="LANE",
        help=f"fail unless something was compared on this lane ({', '.join(LANES)}); "
        "nccl and nccl_shared also forbid falling back to gloo on the CPU; may be repeated",
    )
    group.addoption(
        "--ddp-json", type=Path, metavar="PATH", help="write the results to this file, as JSON"
    )
    group.addoption(
        "--ddp-export-repro",
        type=Path,
        metavar="DIR",
        help="for every check that differs in a failing test, write one plain torch script that "
        "shows the difference without this package, for a bug report",
    )
    group.addoption(
        "--ddp-full",
        action="store_true",
        help="report all that is known of a difference, also the causes that were ruled out; by "
        "default a report fits on one screen",
    )
    group.addoption(
        "--ddp-github",
        action="store_true",
        help="print an annotation for GitHub Actions for every failing check, at the line of the "
        "code that its report points at",
    )
    # For ``ddp-equivalence run``: the run fails if it compares nothing.
    group.addoption("--ddp-require-comparison", action="store_true", help=argparse.SUPPRESS)
    group.addoption("--ddp-repeat-with", default="pytest", help=argparse.SUPPRESS)
    # For ``ddp-equivalence run``: it shows its plan, how far it is, and the GPUs that it used.
    group.addoption("--ddp-suite-run", action="store_true", help=argparse.SUPPRESS)
    group.addoption("--ddp-plan", action="store_true", help=argparse.SUPPRESS)
    group.addoption("--ddp-record", type=Path, help=argparse.SUPPRESS)
    # For both of these and ``record``: all pairs of values of the catalogue, in few tests.
    group.addoption("--ddp-pairwise", action="store_true", help=argparse.SUPPRESS)
    # For ``ddp-equivalence record``: it adds every test and check to a record, under these names.
    group.addoption("--ddp-lines", type=Path, help=argparse.SUPPRESS)
    group.addoption("--ddp-lines-of", default="", help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds above 0")
    return seconds


def _seconds_or_none(text: str) -> float:
    seconds = _number(text)
    if not 0 <= seconds < float("inf"):
        right = settings.RIGHT_TRIAL_SECONDS
        raise argparse.ArgumentTypeError(f"{text!r}: expected {right}")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def check_options(config: pytest.Config) -> None:
    """Raises UsageError for options that cannot be right, before anything runs."""
    deadline = config.getoption("--ddp-deadline")
    of_collective = config.getoption("--ddp-collective-deadline")
    if of_collective is not None and of_collective >= deadline:
        raise pytest.UsageError(
            f"--ddp-collective-deadline {of_collective:g}: must be below "
            f"--ddp-deadline {deadline:g}"
        )
    if config.getoption("--in-process") and config.getoption("numprocesses", None):
        raise pytest.UsageError(
            "--in-process: does not work with -n, because the workers of xdist have no terminal"
        )
    if not hasattr(config, "workerinput"):  # under xdist the controller has checked the paths
        _check_path(config, "--ddp-json", FILE, why_no_file)
        _check_path(config, "--ddp-export-repro", FOLDER, why_no_folder)


def _check_path(
    config: pytest.Config, option: str, right: str, why_not: Callable[[Path], str]
) -> None:
    path: Path | None = config.getoption(option)
    if path is not None and (reason := why_not(path)):
        raise pytest.UsageError(f"{option} {path}: expected {right}; {reason}")


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
    of_test = replace(of_run, repeat=f'{command} "{item.nodeid}"')
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

MARKER_SETTINGS = {
    "deadline": "a number of seconds above 0",
    "collective_deadline": "a number of seconds above 0",
    "fresh_ranks": "True or False",
    "in_process": "True or False",
    "allow_changes": "True or False",
    "second_look": "True or False",
    "trial_seconds": RIGHT_TRIAL_SECONDS,
}
"""Setting of ``@pytest.mark.ddp`` -> the values that it accepts."""


def check_markers(item: pytest.Item) -> None:
    """Raises UsageError for a marker of the test whose arguments cannot be right."""
    for marker in item.iter_markers("ddp"):
        _check_settings(f"{item.nodeid}: @pytest.mark.ddp", marker)
    for marker in item.iter_markers("planted_fault"):
        if len(marker.args) != 1 or not _is_fault(marker.args[0]):
            right = "the name of one fault, such as sum_not_mean"
            raise pytest.UsageError(f"{_as_written(item, marker)}: expected {right}")
    for marker in item.iter_markers("trial"):
        if len(marker.args) != 3:
            right = "strategy, layout and lane"
            raise pytest.UsageError(f"{_as_written(item, marker)}: expected {right}")


def _as_written(item: pytest.Item, marker: pytest.Mark) -> str:
    return f"{item.nodeid}: @pytest.mark.{marker.name}({', '.join(map(repr, marker.args))})"


def _is_fault(name: object) -> bool:
    from ddp_equivalence.faults import FAULTS

    return isinstance(name, str) and name in FAULTS


def _check_settings(where: str, marker: pytest.Mark) -> None:
    names = ", ".join(MARKER_SETTINGS)
    for value in marker.args:
        raise pytest.UsageError(f"{where}({value!r}): expected name=value with one of {names}")
    for name, value in marker.kwargs.items():
        if name not in MARKER_SETTINGS:
            raise pytest.UsageError(f"{where}({name}): expected one of {names}")
        right = MARKER_SETTINGS[name]
        is_bool = isinstance(value, bool)
        may_be_zero = name == "trial_seconds" and value == 0
        is_number = isinstance(value, int | float) and not is_bool
        is_seconds = is_number and (0 < value < float("inf") or may_be_zero)
        if not (is_bool if right == "True or False" else is_seconds):
            raise pytest.UsageError(f"{where}({name}={value!r}): expected {right}")
    deadline, collective = map(marker.kwargs.get, ("deadline", "collective_deadline"))
    if deadline is not None and collective is not None and collective >= deadline:
        raise pytest.UsageError(
            f"{where}(collective_deadline={collective!r}): must be below the deadline, {deadline!r}"
        )


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
