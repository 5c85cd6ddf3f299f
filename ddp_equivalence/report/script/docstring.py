"""The docstring of a script: what it compares, and how to run it."""

from __future__ import annotations

import platform
import shlex
import textwrap
from pathlib import Path

import torch

from ddp_equivalence.case.case import name_of
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.report.script.slicing.contents import Contents


def docstring(request: Request, file: str, headline: str, contents: Contents) -> str:
    """The text of the docstring. ``file``: the name of the script's file."""
    case, step = request.case, name_of(request.step)
    measured = "change of the weights" if request.compare == "update" else "gradients"
    shards = "the whole batch on every rank" if case.shards == OWN else f"shards {case.shards}"
    paragraphs = [
        _paragraph(headline or f"{step} compared with one big batch"),
        _paragraph(
            f"This script compares the {measured} that {step} leaves on every rank with the "
            f"{measured} of one big batch on one device in float64. It prints the relative error "
            "and the ratio of norms for every parameter and rank. Exit code 0: same, 1: different."
        ),
        f"    {_torchrun_command(request, file)}",
        _paragraph(
            f"Layout {case.layout} (nodes are simulated on one host), {shards}, "
            f"{case.dtype_name}, seed {case.seed}. Written with torch {torch.__version__}, "
            f"Python {platform.python_version()}."
        ),
    ]
    if contents.local_files:
        files = ", ".join(sorted(contents.local_files))
        paragraphs.append(_paragraph(f"It imports files that are not installed packages: {files}."))
    if contents.files_using_their_path:
        files = ", ".join(sorted(contents.files_using_their_path))
        paragraphs.append(_paragraph(f"It may read files in the folder of {files}."))
    return "\n\n".join(paragraphs) + "\n"


def command_of(path: Path) -> str:
    """The command that runs a script that has been written, read from its docstring."""
    lines = path.read_text().splitlines()
    command = next(line for line in lines if line.startswith("    torchrun "))
    return command.strip().replace(path.name, shlex.quote(str(path)))


def _torchrun_command(request: Request, file: str) -> str:
    return f"torchrun --nproc-per-node {request.processes.world_size} {file}"


def _paragraph(text: str, width: int = 96) -> str:
    """Wrapped text without anything that would end the docstring or escape a character."""
    text = text.replace("\\", "/").replace('"""', "'''")
    return "\n".join(textwrap.wrap(text, width)).rstrip('"')
