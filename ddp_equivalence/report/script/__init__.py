"""A difference as one plain torch script, which needs nothing of this package: for a bug report."""

from __future__ import annotations

import platform
import re
import shlex
from pathlib import Path
from typing import Unpack

import torch

from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.case.shards import OWN
from ddp_equivalence.measurement.request import CheckOptions, Request, read_request
from ddp_equivalence.measurement.work import Step
from ddp_equivalence.report.script.filling import filled
from ddp_equivalence.report.script.literals import NoSource
from ddp_equivalence.report.script.script import render, wrapped
from ddp_equivalence.report.script.slicer import Slicer


def export(
    case: Case,
    step: Step | str,
    directory: Path,
    *,
    headline: str = "",
    name: str = "",
    **options: Unpack[CheckOptions],
) -> Path:
    """Write a script that shows on its own what ``check(case, step, ...)`` compares.

    ``torchrun --nproc-per-node W script.py`` prints every parameter's relative error and ratio of
    norms by rank, and ends with exit code 1 if something differs, 0 if not. ``headline``: first
    line of its docstring. ``name``: of the file, without ``.py``. ``options``: those of ``check``.
    The directory is made if it is not there; a script of the same name is replaced.

    Returns its path. Raises BadCase if an argument cannot be right, or a function of the case has
    no source that could stand in a file: nothing is written then.
    """
    return export_request(
        read_request(case, step, options), directory, headline=headline, name=name
    )


def export_request(
    request: Request, directory: Path, *, headline: str = "", name: str = ""
) -> Path:
    """The same for a check whose arguments have been looked at."""
    path = Path(directory) / f"{name or default_name(request)}.py"
    slicer = filled(request)
    docstring = _docstring(request, path.name, headline, slicer)
    try:
        text = render(slicer, docstring)
    except (NoSource, SyntaxError) as error:
        right = f"a function defined at the top level of a file; {error}"
        raise BadCase("step", name_of(request.step), right) from error
    if Path(directory).exists() and not Path(directory).is_dir():
        raise BadCase("directory", str(directory), "a folder, or a path where one can be made")
    Path(directory).mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def default_name(request: Request) -> str:
    """A file name, without its ending, that says what it shows."""
    case = request.case
    parts = [name_of(request.step), name_of(case.model), name_of(case.loss)]
    parts += [case.layout, case.shards, case.dtype_name]
    if request.step_count > 1:
        parts.append(f"{request.step_count}steps")
    if request.compare == "update":
        parts.append("update")
    return file_name("-".join(parts))


def file_name(text: str) -> str:
    """``repro_`` and the text, with nothing that a shell or a file system would mind."""
    return "repro_" + re.sub(r"[^\w.+-]+", "_", text).strip("_")[:150]


def command(request: Request, path: Path | str) -> str:
    """What runs the script."""
    return f"torchrun --nproc-per-node {request.processes.world_size} {path}"


def command_of(path: Path) -> str:
    """What runs a script that was written, as its docstring says."""
    line = next(one for one in path.read_text().splitlines() if one.startswith("    torchrun "))
    return line.strip().replace(path.name, shlex.quote(str(path)))


def _docstring(request: Request, file: str, headline: str, slicer: Slicer) -> str:
    case = request.case
    what = "the change of the weights" if request.compare == "update" else "the gradients"
    dealt = "the whole batch on every rank" if case.shards == OWN else f"shards {case.shards}"
    lines = [
        wrapped(headline or f"{name_of(request.step)} beside one big batch"),
        wrapped(
            f"Compares {what} that {name_of(request.step)} leaves on every rank with those of one "
            "big batch on one device in float64: the relative error and the ratio of norms, by "
            "parameter and rank. Exit code 1: they differ, 0: they are the same."
        ),
        f"    {command(request, file)}",
        wrapped(
            f"Layout {case.layout} (nodes are simulated on one host), {dealt}, "
            f"{case.dtype_name}, seed {case.seed}. Made with torch {torch.__version__}, Python "
            f"{platform.python_version()}."
        ),
    ]
    if slicer.not_sliced:
        lines.append(wrapped(f"Needs modules of its own: {', '.join(sorted(slicer.not_sliced))}."))
    if slicer.reads_near:
        lines.append(wrapped(f"Looks for files near {', '.join(sorted(slicer.reads_near))}."))
    return "\n\n".join(lines) + "\n"
