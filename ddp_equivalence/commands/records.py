"""The commands about finished records: ``gate``, ``report``, ``receipt`` and ``verify-receipt``."""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, EXIT_CODE_OF_LEVEL, SAME
from ddp_equivalence.commands.record import record_again
from ddp_equivalence.commands.suite_folder import OPTIONS_OF_SUITE, suite_folder
from ddp_equivalence.gate.receipt import KEY_VARIABLE, Wanted, read_receipt, refusals, write_receipt
from ddp_equivalence.gate.record import read_record
from ddp_equivalence.ranks.backend_names import LANES
from ddp_equivalence.report.text import painted, require_writable_file

# ``gate``: hold one record against another, red or green with reasons.

GATE = "hold a record against another one: red or green, with reasons"


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command ``gate``."""
    parser.description = (
        "Say what has changed between two records of `ddp-equivalence record`, such as "
        "under two versions of torch, and whether that is red, yellow or information. Exit code "
        "0: green, 1: red, 2: bad input, 4: yellow, and nothing is red."
    )
    parser.add_argument(
        "records",
        metavar="RECORD",
        type=Path,
        nargs="+",
        help="the record that was good, and the one to judge; with more of them, the last is "
        "judged, the one before it is what it is held against, and those before it show how much "
        "errors and times vary",
    )
    parser.add_argument(
        "--against-now",
        type=Path,
        metavar="OUT",
        help="record here and now what the last RECORD is of, into this folder, and judge that",
    )
    parser.add_argument("-n", default="0", metavar="N", help="with --against-now, as for `record`")
    parser.add_argument(
        "--observe",
        action="append",
        default=[],
        metavar="COMMAND",
        help="with --against-now: allow this command, which the record has observed, to be run",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="a TOML file that says which findings are red, yellow or information "
        "(docs/upgrades.md)",
    )
    parser.add_argument(
        "--markdown",
        type=Path,
        metavar="PATH",
        help="add the findings to this file, as for a comment or $GITHUB_STEP_SUMMARY",
    )
    parser.add_argument("--junit", type=Path, metavar="PATH", help="write JUnit XML to this file")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write JSON to this file")
    parser.add_argument(
        "--github",
        action="store_true",
        help="print an annotation for GitHub Actions for each finding that is red",
    )
    parser.add_argument(
        "--full", action="store_true", help="print every finding, and not only the first of a kind"
    )


def run_gate(arguments: argparse.Namespace) -> int:
    """Print the findings. Raises BadCase for what is no record, or no policy."""
    from ddp_equivalence.gate import outputs
    from ddp_equivalence.gate.judge import judge, read_policy

    writers = {
        "markdown": outputs.write_markdown,
        "junit": outputs.write_junit,
        "json": outputs.write_json,
    }
    for name in writers:
        require_writable_file(name, getattr(arguments, name))
    policy = read_policy(arguments.policy)
    if arguments.against_now is None and len(arguments.records) == 1:
        raise BadCase("RECORD", str(arguments.records[0]), "two records, or have --against-now")
    records = list(map(read_record, arguments.records))
    if arguments.against_now is not None:
        record_again(records[-1], arguments.against_now, arguments.n, arguments.observe)
        records.append(read_record(arguments.against_now))
    for record, path in zip(records, [*arguments.records, arguments.against_now], strict=False):
        if sum(one.name == record.name for one in records) > 1:
            record.name = str(path)
    *earlier, old, new = records
    judgement = judge(old, new, policy, datetime.date.today(), earlier)
    print(painted(outputs.report(judgement, arguments.full), sys.stdout), end="")
    for name, write in writers.items():
        if (path := getattr(arguments, name)) is not None:
            write(judgement, path)
    if arguments.github:
        print("\n".join(outputs.github_annotations(judgement)))
    return EXIT_CODE_OF_LEVEL[judgement.level]


# ``report``: a page about one or several records.

REPORT = "write a page about records: what was compared, what fails, what has changed"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command ``report``."""
    parser.description = (
        "Write one HTML file, which needs no network: what was compared, the report of "
        "every check that is not as expected, with shares and errors, and what has changed from "
        "each record to the next."
    )
    parser.add_argument(
        "records", metavar="RECORD", nargs="+", type=Path, help="records, the oldest first"
    )
    parser.add_argument(
        "--html", type=Path, required=True, metavar="PATH", help="the file to write"
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="as for `gate`")


def run_report(arguments: argparse.Namespace) -> int:
    """Write the page. Raises BadCase for what is no record."""
    from ddp_equivalence.gate.judge import read_policy
    from ddp_equivalence.gate.page import write_page

    require_writable_file("html", arguments.html)
    policy = read_policy(arguments.policy)
    records = [read_record(path) for path in arguments.records]
    write_page(records, policy, datetime.date.today(), arguments.html)
    print(f"The page is {arguments.html}")
    return SAME


# ``receipt``: a small file about a run on GPUs, for a job that has none.

RECEIPT = "write a small file about a recorded run, which a job without GPUs can verify"


def add_receipt(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command ``receipt``."""
    parser.description = (
        "Write what a recorded run of the suite has shown, and where, to a small file. "
        "`ddp-equivalence verify-receipt` verifies it. With a secret in "
        "DDP_EQUIVALENCE_RECEIPT_KEY, the file is signed."
    )
    parser.add_argument("record", metavar="RECORD", type=Path, help="of `ddp-equivalence record`")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("receipt.json"),
        metavar="PATH",
        help="the file to write; default %(default)s",
    )


def run_receipt(arguments: argparse.Namespace) -> int:
    """Write the file. Raises BadCase for what is no record, or one that was cut off."""
    require_writable_file("out", arguments.out)
    key = os.environ.get(KEY_VARIABLE, "")
    write_receipt(read_record(arguments.record), arguments.out, key)
    print(f"The receipt is {arguments.out} ({'signed' if key else 'not signed'})")
    return SAME


# ``verify-receipt``: has the suite passed on GPUs, with the code that is here?

VERIFY_RECEIPT = "verify the receipt of a run on GPUs, without a GPU"


def add_verify_receipt(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command ``verify-receipt``."""
    parser.description = (
        "Say whether a receipt shows that the suite which is installed here has passed "
        "on another machine. Exit code 0: it does, 1: it is refused, with the reasons, 2: bad "
        "input."
    )
    parser.add_argument("receipt", metavar="RECEIPT", type=Path)
    parser.add_argument(
        "--must-run",
        action="append",
        default=[],
        choices=LANES,
        metavar="LANE",
        help="refuse it unless something was compared on this lane, such as nccl; may be repeated",
    )
    parser.add_argument(
        "--max-age", type=float, default=30.0, metavar="DAYS", help="default %(default)g"
    )
    parser.add_argument(
        "--torch", metavar="VERSION", help="the version that must have run; default that of here"
    )


def run_verify_receipt(arguments: argparse.Namespace) -> int:
    """Print the verdict. Raises BadCase for what is no receipt."""
    from ddp_equivalence.gate.surroundings import source_digest

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
    words = [*OPTIONS_OF_SUITE, "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *words],
        cwd=suite_folder(),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    found = [f"suite: {line}" for line in run.stdout.splitlines() if "::" in line]
    if run.returncode or not found:
        last = (run.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        raise BadCase("suite", str(suite_folder()), f"a suite that pytest can collect; {last}")
    return found
