"""Pytest as somebody else starts it, in a folder of theirs and on tests of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from tests.package.one_server import with_server_of_these_tests
from tests.package.ranks.marked_run import MARK_VARIABLE

LONGEST = 240
"""Seconds after which a run is taken to hang."""

SLOW = ("no:cacheprovider", "no:unraisableexception", "no:threadexception")
"""Parts of pytest that these runs do without. The last two collect garbage ten times at the end."""


def command(*arguments: str, plugins: str = "no:randomly", before: Sequence[str] = ()) -> list[str]:
    """The command line of such a run. ``before``: a command that starts it, such as ``nohup``."""
    words = [*before, sys.executable, "-m", "pytest"]
    for plugin in (plugins, *SLOW):
        words += ["-p", plugin]
    if "ddp_equivalence.pytest_plugin" not in entry_points(group="pytest11").names:
        words += ["-p", "ddp_equivalence.pytest_plugin"]
    return [*words, *arguments]


def hear_ctrl_c() -> None:
    """``preexec_fn`` of a run that is to be interrupted: under nohup it would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of these tests, without what pytest put into it."""
    root = str(Path(__file__).parents[2])
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    return outer | {"PYTHONPATH": root} | dict(more or {})


def run(
    folder: Path,
    *arguments: str,
    plugins: str = "no:randomly",
    typed: str = "",
    before: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    own_server: bool = False,
) -> tuple[int, str]:
    """Exit status and output of a run in ``folder``.

    ``typed``: what its user types. ``more``: environment variables. ``own_server``: the run starts
    its fork server itself, as a run does of which is seen what it leaves behind.
    """
    variables = environment(more)
    if not own_server and MARK_VARIABLE not in variables:
        variables = with_server_of_these_tests(variables)
    done = subprocess.run(
        command(*arguments, plugins=plugins, before=before),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
        env=variables,
        input=typed,
    )
    return done.returncode, done.stdout + done.stderr
