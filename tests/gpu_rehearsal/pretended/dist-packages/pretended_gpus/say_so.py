"""Whatever a rehearsal prints says that it was rehearsed.

The first process says so at once. Every pytest run ends with the sentence, and torch's version,
which every report names, ends with "rehearsed". GPUs have the word in their name.
"""

from __future__ import annotations

import os
import sys

from pretended_gpus import settings

SAID = "PRETEND_SAID"
PYTEST_PLUGIN = "pretended_gpus.last_lines_of_pytest"


def sentence() -> str:
    """What this is."""
    gpus = "1 pretended GPU" if settings.gpus() == 1 else f"{settings.gpus()} pretended GPUs"
    return f"REHEARSED on {gpus}: every result here was computed on the CPU, and NCCL was gloo."


def in_this_process() -> None:
    """Let the first process print the sentence, and every pytest run end with it.

    The first process also makes the folder of the contexts, unless somebody has.
    """
    plugins = [name for name in os.environ.get("PYTEST_PLUGINS", "").split(",") if name]
    if PYTEST_PLUGIN not in plugins:
        os.environ["PYTEST_PLUGINS"] = ",".join([*plugins, PYTEST_PLUGIN])
    if SAID not in os.environ:
        os.environ[SAID] = "1"
        if settings.FOLDER not in os.environ:
            import tempfile

            os.environ[settings.FOLDER] = tempfile.mkdtemp(prefix="rehearsal-")
        print(sentence(), file=sys.stderr, flush=True)
