"""``ddp-equivalence receipt``: a small file about a run on GPUs, for a job that has none."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.commands.exit_codes import SAME
from ddp_equivalence.commands.output import require_writable_file

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "receipt",
        help="write a small file about a recorded run, which a job without GPUs can verify",
        description="Write what a recorded run of the suite has shown, and where, to a small file. "
        "`ddp-equivalence verify-receipt` verifies it. With a secret in "
        "DDP_EQUIVALENCE_RECEIPT_KEY, the file is signed.",
    )
    parser.add_argument("record", metavar="RECORD", type=Path, help="of `ddp-equivalence record`")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("receipt.json"),
        metavar="PATH",
        help="the file to write; default %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Raises BadCase for what is no record, or one that was cut off."""
    from ddp_equivalence.gate.receipt import KEY_VARIABLE, write_receipt
    from ddp_equivalence.gate.record import read_record

    require_writable_file("out", arguments.out)
    key = os.environ.get(KEY_VARIABLE, "")
    write_receipt(read_record(arguments.record), arguments.out, key)
    print(f"The receipt is {arguments.out} ({'signed' if key else 'not signed'})")
    return SAME
