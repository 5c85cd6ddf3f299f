"""Pytest as somebody else starts it, in a folder of theirs and on tests of theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.package.forks import completed
from tests.package.one_server import with_server_of_these_tests

LONGEST = 240
"""Seconds after which a run is taken to hang."""

SLOW = ("no:cacheprovider", "no:unraisableexception", "no:threadexception")
"""Parts of pytest that these runs do without. The last two collect garbage ten times at the end."""

PLUGINS = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "xdist.plugin,ddp_equivalence.pytest_plugin",
}
"""Only the plugins that are needed: importing all installed ones takes as long as the tests."""


def command(*arguments: str) -> list[str]:
    """The command line of such a run."""
    return [sys.executable, "-m", "pytest", *(w for one in SLOW for w in ("-p", one)), *arguments]


def hear_ctrl_c() -> None:
    """``preexec_fn`` of a run that is to be interrupted: under nohup it would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of these tests, without what pytest put into it."""
    root = str(Path(__file__).parents[2])
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    return outer | PLUGINS | {"PYTHONPATH": root} | dict(more or {})


def run(
    folder: Path,
    *arguments: str,
    typed: str = "",
    before: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    own_processes: bool = False,
) -> tuple[int, str]:
    """Exit status and output of a run in ``folder``.

    ``typed``: what its user types. ``before``: a command that starts it, such as ``nohup``.
    ``more``: environment variables. ``own_processes``: it is no fork of a process of these tests,
    and starts its fork server itself, as a run does of which is seen what it leaves behind.
    """
    variables, words = environment(more), command(*arguments)
    if own_processes or before:
        done = subprocess.run(
            [*before, *words],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
            env=variables if own_processes else with_server_of_these_tests(variables),
            input=typed,
        )
    else:
        done = completed(words, folder, with_server_of_these_tests(variables), LONGEST, typed)
    return done.returncode, done.stdout + done.stderr
