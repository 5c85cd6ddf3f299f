"""``ddp-equivalence run``: the suite on this machine, and its table."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    run = commands.add_parser(
        "run",
        help="run the suite on this machine and print the table",
        description="Run the suite on this machine and print what was compared with one big batch. "
        "Every other argument goes to pytest: -k ddp_mean, -n 2, -x.",
        allow_abbrev=False,
    )
    run.add_argument("--json", type=Path, metavar="PATH", help="write machine-readable results")
    run.add_argument(
        "--must-run",
        action="append",
        default=[],
        metavar="LANE",
        help="fail unless something was compared on this lane, such as nccl or data_parallel",
    )


def run(known: argparse.Namespace) -> NoReturn:
    """Become pytest, with the comparisons to run."""
    from ddp_equivalence.commands.suite_folder import is_checkout, suite_folder

    # Paths are the caller's own; what is not there is meant within the suite.
    given = [
        _absolute(one, before) for one, before in zip(known.rest, ["", *known.rest], strict=False)
    ]
    arguments = [
        "-o",
        "testpaths=tests/equivalence tests/difference tests/diagnosis/test_planted_faults.py",
        "--ddp-require-comparison",
        "--ddp-repeat-with=ddp-equivalence run",
        *(f"--must-run={lane}" for lane in known.must_run),
        *given,
    ]
    if known.json is not None:
        arguments.append(f"--ddp-json={known.json.resolve()}")
    if not is_checkout():
        cache = Path(tempfile.gettempdir()) / f"ddp_equivalence-pytest-cache-{os.getuid()}"
        arguments += ["-o", f"cache_dir={cache}"]
    os.chdir(suite_folder())
    # This process becomes pytest: one to interrupt, and nothing of the package imported before
    # pytest has seen it, which it warns of.
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


def _absolute(argument: str, before: str) -> str:
    path, separator, test = argument.partition("::")
    value_of_option = before.startswith("-") and "=" not in before
    if argument.startswith("-") or value_of_option or not Path(path).exists():
        return argument
    return f"{Path(path).resolve()}{separator}{test}"
