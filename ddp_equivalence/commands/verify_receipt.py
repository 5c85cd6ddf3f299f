"""``ddp-equivalence verify-receipt``: has the suite passed on GPUs, with the code that is here?"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, SAME
from ddp_equivalence.ranks.backend_names import LANES

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "verify-receipt",
        help="verify the receipt of a run on GPUs, without a GPU",
        description="Say whether a receipt shows that the suite which is installed here has passed "
        "on another machine. Exit code 0: it does, 1: it is refused, with the reasons, 2: bad "
        "input.",
    )
    parser.add_argument("receipt", metavar="RECEIPT", type=Path)
    parser.add_argument(
        "--must-run",
        action="append",
        default=[],
        metavar="LANE",
        help="refuse it unless something was compared on this lane, such as nccl; may be repeated",
    )
    parser.add_argument(
        "--max-age", type=float, default=30.0, metavar="DAYS", help="default %(default)g"
    )
    parser.add_argument(
        "--torch", metavar="VERSION", help="the version that must have run; default that of here"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the verdict. Raises BadCase for what is no receipt."""
    from ddp_equivalence.commands.suite_folder import suite_folder
    from ddp_equivalence.gate.receipt import KEY_VARIABLE, Wanted, read_receipt, refusals
    from ddp_equivalence.gate.surroundings import source_digest

    for lane in arguments.must_run:
        if lane not in LANES:
            raise BadCase("must_run", lane, f"one of {', '.join(LANES)}")
    if not arguments.max_age > 0:
        raise BadCase("max_age", arguments.max_age, "a number of days above 0")
    receipt = read_receipt(arguments.receipt)
    wanted = Wanted(
        source=source_digest(suite_folder()),
        torch=arguments.torch or metadata.version("torch").partition("+")[0],
        tests=_tests_of_the_suite(),
        must_run=arguments.must_run,
        most_days=arguments.max_age,
        key=os.environ.get(KEY_VARIABLE, ""),
    )
    reasons = list(refusals(receipt, wanted, datetime.datetime.now(datetime.UTC)))
    if reasons:
        print(f"refused: {arguments.receipt}")
        print("\n".join(f"  {reason}" for reason in reasons))
        return DIFFERENT
    environment, lanes = receipt["environment"], receipt["lanes"]
    compared = ", ".join(f"{sum(one.values())} on {lane}" for lane, one in lanes.items())
    print(f"accepted: {arguments.receipt}, made {receipt['made']}")
    print(f"  torch {environment['torch']}, GPUs: {', '.join(environment['gpus']) or 'none'}")
    print(f"  checks: {compared}")
    return SAME


def _tests_of_the_suite() -> list[str]:
    """The names of the tests, as a record has them. Raises BadCase if they are not collected."""
    from ddp_equivalence.commands.suite_folder import TESTS, suite_folder

    words = ["-o", f"testpaths={TESTS}", "-W", "default", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *words],
        cwd=suite_folder(),
        env={**os.environ, **WITHOUT_GPUS},
        capture_output=True,
        text=True,
    )
    found = [f"suite: {line}" for line in run.stdout.splitlines() if "::" in line]
    if run.returncode or not found:
        last = (run.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        raise BadCase("suite", str(suite_folder()), f"a suite that pytest can collect; {last}")
    return found
