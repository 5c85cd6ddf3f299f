"""The plugin's options and markers, and the settings that they make for a test."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_equivalence.case import settings
from ddp_equivalence.ranks.backend_names import BACKENDS, LANES

MARKERS = (
    "gloo_fallback: runs on gloo and the CPU because there are too few GPUs for NCCL",
    "gloo: runs on gloo and the CPU, as asked for",
    "gloo_cuda: runs on gloo with CUDA tensors",
    "nccl: runs on an NCCL backend, one rank per GPU",
    "emulated: one process on the CPU does what nn.DataParallel does on several GPUs",
    "data_parallel: runs the real nn.DataParallel on two or more GPUs",
    "difference: the case is known to differ from one big batch",
    "ddp(deadline, collective_deadline, fresh_ranks, in_process, allow_changes, second_look): "
    "settings of the checks made by this test",
    "self_check: checks made by this test are left out of the closing table",
    "planted_fault(name): checks made by this test count as this fault, planted",
    "trial(what, layout, lane): one case of the catalogue, for the closing table",
)

OF_MARKER = {
    "deadline": "seconds, above 0",
    "collective_deadline": "seconds, above 0",
    "fresh_ranks": "True or False",
    "in_process": "True or False",
    "allow_changes": "True or False",
    "second_look": "True or False",
}
"""What ``@pytest.mark.ddp`` can set, and the values that are right."""


def add_options(parser: pytest.Parser) -> None:
    """All options of the plugin."""
    group = parser.getgroup("ddp_equivalence", "ddp_equivalence: compared with one big batch")
    group.addoption(
        "--ddp-backend",
        choices=BACKENDS,
        default="auto",
        help="backend of the ranks; auto is NCCL with one GPU per rank, else gloo on the CPU",
    )
    group.addoption(
        "--must-run",
        action="append",
        choices=LANES,
        default=[],
        metavar="LANE",
        help=f"fail unless something was compared on this lane ({', '.join(LANES)}); "
        "nccl also forbids falling back to gloo; may be repeated",
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
        help="time that one collective in it gets (default half of that)",
    )
    group.addoption(
        "--ddp-run-deadline",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="time for the whole run; what has not run by then fails the run (default none)",
    )
    group.addoption(
        "--fresh-ranks",
        action="store_true",
        help="start new processes for every check instead of keeping them warm",
    )
    group.addoption(
        "--in-process",
        action="store_true",
        help="rank 0 is the process of the test, without a deadline: breakpoint() works in a step",
    )
    group.addoption(
        "--ddp-allow-changes",
        action="store_true",
        help="a step may change its process (seed, environment, default dtype, threads left "
        "running ...) without failing its check; it is undone in any case",
    )
    group.addoption(
        "--ddp-no-second-look",
        action="store_true",
        help="do not run a step once more to find out more: after it hung or was aborted, under "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL; after it differed, watched",
    )
    group.addoption(
        "--ddp-json", type=Path, metavar="PATH", help="write the results, machine-readable"
    )
    group.addoption(
        "--plant",
        metavar="NAME",
        help="break training in a known way in every test (sum_not_mean, rank_left_out ...; "
        "`ddp-equivalence faults --list`) and list the tests that do not notice",
    )
    group.addoption(
        "--ddp-export-repro",
        type=Path,
        metavar="DIR",
        help="for every check that differs in a failing test, write one plain torch script that "
        "shows the difference without this package, for a bug report",
    )
    # For the command line: a run of the suite that compares nothing has failed.
    group.addoption("--ddp-require-comparison", action="store_true", help=argparse.SUPPRESS)
    group.addoption("--ddp-repeat-with", default="pytest", help=argparse.SUPPRESS)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: seconds, above 0")
    return value


def settings_of(item: pytest.Item, run_until: float | None, width: int) -> settings.Settings:
    """What the options say, and the test's own markers."""
    option = item.config.getoption
    run = settings.Settings(
        backend=option("--ddp-backend"),
        deadline=option("--ddp-deadline"),
        collective_deadline=option("--ddp-collective-deadline"),
        run_until=run_until,
        fresh_ranks=option("--fresh-ranks"),
        in_process=option("--in-process"),
        allow_changes=option("--ddp-allow-changes"),
        second_look=not option("--ddp-no-second-look"),
        must_run=tuple(option("--must-run")),
        repeat=f'{option("--ddp-repeat-with")} "{item.nodeid}"',
        width=width,
    )
    for marker in reversed(list(item.iter_markers("ddp"))):  # the nearest one last
        run = replace(run, **marker.kwargs)
    return run


def check_marker(item: pytest.Item, marker: pytest.Mark) -> None:
    """A setting that is none, or cannot be right, is refused before anything runs."""
    for name, value in [*marker.kwargs.items(), *((repr(one), None) for one in marker.args)]:
        right = OF_MARKER.get(name)
        if right is None:
            known = ", ".join(OF_MARKER)
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ddp({name}): one of {known}")
        is_bool = isinstance(value, bool)
        seconds = isinstance(value, int | float) and not is_bool and 0 < value < float("inf")
        if not (is_bool if right == "True or False" else seconds):
            raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.ddp({name}={value!r}): {right}")
