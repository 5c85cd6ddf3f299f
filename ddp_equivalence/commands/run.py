"""``ddp-equivalence run``: run the suite on this machine and print its table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from ddp_equivalence.case.errors import BadCase, Words
from ddp_equivalence.commands.suite_folder import (
    OPTIONS_OF_SUITE,
    cache_folder,
    is_checkout,
    suite_folder,
)
from ddp_equivalence.ranks.backend_names import LANES
from ddp_equivalence.report.text import require_writable_file, require_writable_folder

EVERY_GPU_LANE = "gpu"
"""The value of ``--must-run`` that stands for several lanes."""

OF_THE_CHECKOUT = Path("docs", "records")
"""Where ``--record`` without a folder writes: in the checkout, wherever it is called."""

HELP = "run the suite on this machine and print the table"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Run the suite on this machine and print what was compared with one big batch. "
        "Every other argument goes to pytest, such as -k ddp_mean, -n 2 or -x."
    )
    parser.allow_abbrev = False
    parser.add_argument(
        "--all",
        action="store_true",
        help="run all tests. By default, run only a selection in which every pair of strategy, "
        "layout, model, loss, shards, type, cause and lane occurs that the suite has (pairwise), "
        "and less of strategies that keep the rule of another. Tests that are named, such as by "
        "-k, all run",
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results to this file, as JSON"
    )
    parser.add_argument(
        "--must-run",
        action="append",
        default=[],
        choices=(EVERY_GPU_LANE, *LANES),
        metavar="LANE",
        help="fail unless something was compared on this lane, such as nccl or data_parallel; may "
        f"be repeated. {EVERY_GPU_LANE}: all lanes on GPUs that this machine can run, and at least "
        "nccl",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="say what this machine has, what would run on which lane, what would not and why; run "
        "nothing",
    )
    parser.add_argument(
        "--record",
        type=Path,
        nargs="?",
        const=OF_THE_CHECKOUT,
        metavar="DIR",
        help="write the machine, the plan and the results to a page in this folder, without names "
        "of hosts and users and without paths (default: docs/records of this checkout)",
    )


def run(arguments: argparse.Namespace) -> NoReturn:
    """Become pytest, which runs the comparisons. Raises BadCase if the results have no place."""
    require_writable_file("json", arguments.json)
    record = _folder_of_records(arguments.record)
    rest, must_run = arguments.rest, _must_run(arguments.must_run)
    of_pytest = [
        *OPTIONS_OF_SUITE,
        "--ddp-require-comparison",
        "--ddp-repeat-with=ddp-equivalence run",
        "--ddp-suite-run",
        *(f"--must-run={lane}" for lane in must_run),
        *(_absolute(argument, before) for argument, before in zip(rest, ["", *rest], strict=False)),
        *([] if arguments.all else ["--ddp-pairwise"]),
        *([] if arguments.json is None else [f"--ddp-json={arguments.json.resolve()}"]),
        *([] if record is None else [f"--ddp-record={record}"]),
        *(["--ddp-plan"] if arguments.plan else []),
        *([] if is_checkout() else ["-o", f"cache_dir={cache_folder()}"]),
    ]
    os.chdir(suite_folder())
    # This process becomes pytest, so that Ctrl-C reaches one process only. Pytest would also warn
    # of modules of the package that were imported before it loads the plugin; after execv there
    # are none.
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *of_pytest])


def _must_run(given: Sequence[str]) -> Iterator[str]:
    """The lanes that ``--must-run`` requires: those that it names, and for ``gpu`` NCCL, and the
    lanes on GPUs on which this machine can run cases of the catalogue.
    """
    yield from (name for name in given if name != EVERY_GPU_LANE)
    if EVERY_GPU_LANE not in given:
        return
    from ddp_equivalence.ranks.lanes import missing
    from ddp_equivalence.strategies.catalogue import world_sizes

    yield "nccl"
    for lane in ("nccl_shared", "data_parallel", "data_parallel_shared", "gloo_cuda"):
        if not all(missing(lane, ranks) for ranks in world_sizes() if ranks > 1):
            yield lane


def _folder_of_records(given: Path | None) -> Path | None:
    """Where the page of this run goes; None if no page is wanted. Raises BadCase."""
    if given is None:
        return None
    if given is OF_THE_CHECKOUT:
        if not is_checkout():
            value = Words("without a folder")
            raise BadCase("record", value, "--record DIR: the suite is not in a checkout here")
        given = suite_folder() / given
    require_writable_folder("record", given)
    return given.resolve()


def _absolute(argument: str, before: str) -> str:
    """The argument; made an absolute path if it names a file or folder of the caller.

    A path that does not exist in the caller's folder is left as it is, because it may name a file
    of the suite. ``before``: the argument that stands before this one.
    """
    path, separator, test = argument.partition("::")
    value_of_option = before.startswith("-") and "=" not in before
    if argument.startswith("-") or value_of_option or not Path(path).exists():
        return argument
    return f"{Path(path).resolve()}{separator}{test}"
