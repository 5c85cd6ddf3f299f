"""Cleans up when the fork server ends: kills what ranks have started, deletes its socket's file.

The server ends when the judging process does. A judging process that is killed cannot clean up
itself, so the server does it. Only the server imports this module, and before anything else,
because importing torch takes seconds in which the judging process may be killed.
"""

from __future__ import annotations

import os
import shutil
import sys
from multiprocessing import util

from ddp_equivalence.ranks import process_tree
from ddp_equivalence.ranks.server import FOLDER_VARIABLE


def _clean_up() -> None:
    process_tree.kill(process_tree.descendants(os.getpid()))
    if not hasattr(sys, "last_value"):  # after a server that failed, the next one uses the folder
        shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)


if FOLDER_VARIABLE in os.environ:
    # A signal to the process group of the judging process must not end the server.
    os.setpgrp()
    util.Finalize(None, _clean_up, exitpriority=0)
