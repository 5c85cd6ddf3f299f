"""What the fork server does last: end all that ranks have started, remove the file of its socket.

It ends when the judging process does, however that ends: a process that is killed cleans up
nothing itself. To be imported in the server alone, and first: torch takes seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
from multiprocessing import util

from ddp_equivalence.ranks import process_tree
from ddp_equivalence.ranks.server import FOLDER


def _leave_nothing() -> None:
    process_tree.kill(process_tree.descendants(os.getpid()))
    if not hasattr(sys, "last_value"):  # a server that failed leaves the folder to the next one
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


if FOLDER in os.environ:
    os.setpgrp()  # what ends the judging process and all of its group is not for the server
    util.Finalize(None, _leave_nothing, exitpriority=0)
