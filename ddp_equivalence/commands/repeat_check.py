"""The command that repeats ``ddp-equivalence check`` with the options that it was given."""

from __future__ import annotations

import argparse
import shlex

NOT_REPEATED = frozenset(
    ("command", "target", "rest", "explore", "export_repro", "full", "github", "in_process")
)
"""Arguments that say what is done with the result, or how the check is debugged."""


def repeating_command(arguments: argparse.Namespace) -> str:
    """``ddp-equivalence check FILE.py:NAME`` with the options that decide what is compared."""
    words = ["ddp-equivalence", "check", arguments.target]
    for name, value in vars(arguments).items():
        if name in NOT_REPEATED or value is None or value is False:
            continue
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)
