"""Cleans up when the fork server ends: kills its descendants and deletes its socket's folder.

The descendants are the ranks and the processes that these have started.

The server ends when the judging process does. A judging process that is killed cannot clean up
itself, so the server does it. Only the server imports this module. It does so before it imports
torch, because that takes seconds, in which the judging process may be killed.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from multiprocessing import util

from ddp_equivalence.ranks import process_tree
from ddp_equivalence.ranks.server import FOLDER_VARIABLE


def _clean_up() -> None:
    process_tree.kill(process_tree.descendants(os.getpid()))
    # last_value is set if this server failed. The next server then uses the same folder.
    if not hasattr(sys, "last_value"):
        shutil.rmtree(os.environ[FOLDER_VARIABLE], ignore_errors=True)


if FOLDER_VARIABLE in os.environ:
    # A signal to the process group of the judging process must not end the server.
    os.setpgrp()
    util.Finalize(None, _clean_up, exitpriority=0)
    # Collections take a fifth of the import of torch. The last of the server's modules,
    # ``measurement.preload``, switches them on again.
    gc.disable()
