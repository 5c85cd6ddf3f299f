"""Write a check as one plain torch script for a bug report; the script needs no other package."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Unpack

import torch

from ddp_equivalence.case.build import build_model, build_whole_batch, no_group_of_one
from ddp_equivalence.case.case import Case, name_of
from ddp_equivalence.case.errors import BadCase, it_raised
from ddp_equivalence.measurement.request import CheckOptions, Request, read_request
from ddp_equivalence.measurement.work import Step, is_prepared
from ddp_equivalence.reference import big_batch
from ddp_equivalence.report.script.render import render
from ddp_equivalence.report.text import require_writable_folder, write_file

__all__ = ["command_of", "export", "export_request", "file_name"]


def export(
    case: Case,
    step: Step | str,
    directory: Path,
    *,
    headline: str = "",
    name: str = "",
    **options: Unpack[CheckOptions],
) -> Path:
    """Write a script that makes the same comparison as ``check(case, step, ...)`` on its own.

    ``torchrun --nproc-per-node W script.py`` prints the relative error and the ratio of norms for
    every parameter and rank. It exits with code 1 if something differs, else with 0. ``headline``:
    the first line of the script's docstring. ``name``: the file's name, without ``.py``. The
    directory is made if it does not exist; a script of the same name is replaced. ``options``:
    those of ``check``.

    Returns the script's path. Raises BadCase, and writes nothing, if an argument cannot be right
    or a script cannot contain a function of the case.
    """
    return export_request(
        read_request(case, step, options), directory, headline=headline, name=name
    )


def export_request(
    request: Request, directory: Path, *, headline: str = "", name: str = ""
) -> Path:
    """Do what ``export`` does, for a request that has been read already."""
    if not isinstance(directory, str | Path):
        raise BadCase("directory", directory, "a path of a folder")
    require_writable_folder("directory", Path(directory))
    if "/" in name:
        raise BadCase(
            "name", name, "a file name without /, since the folder is the argument directory"
        )
    _check_that_a_script_can_hold(request)
    path = Path(directory) / f"{name or _default_name(request)}.py"
    text = render(request, path.name, headline)
    Path(directory).mkdir(parents=True, exist_ok=True)
    write_file(path, text)
    return path


def command_of(path: Path) -> str:
    """The command that runs a script that has been written, read from its docstring."""
    lines = path.read_text().splitlines()
    command = next(line for line in lines if line.startswith("    torchrun "))
    return command.strip().replace(path.name, shlex.quote(str(path)))


def _check_that_a_script_can_hold(request: Request) -> None:
    """Raises BadCase for what scripts do not contain yet."""
    for option in ("optimizer", "clip", "reference"):
        if getattr(request.training, option) is not None:
            right = "left out for a script, which trains one device with plain SGD"
            raise BadCase(option, name_of(getattr(request.training, option)), right)
    if request.plant:
        raise BadCase("plant", request.plant, "left out: a script runs torch as it is")
    case = request.case
    with no_group_of_one():  # a loss with collectives cannot run on rank 0 of the script alone
        reference = big_batch(case)
    if case.dtype is not torch.float64 and (why := reference.why_not_float64):
        right = f"a case whose loss a script can compute in float64; in that, {why}"
        raise BadCase("dtype", case.dtype, right)
    if any(buffer.is_complex() for buffer in build_model(case).buffers()):
        right = "a model without complex buffers: the script would cast them to real numbers"
        raise BadCase("model", name_of(case.model), right)
    try:
        copy.deepcopy(build_whole_batch(case, request.steps)[0])
    except Exception as error:  # the batch's own code may raise anything
        right = f"a batch that copy.deepcopy can copy, as a script does; {it_raised(error)}"
        raise BadCase("batch", name_of(case.batch), right) from error
    if is_prepared(request.step):
        right = "a function (model, shard, rank): a script calls the step with all three"
        raise BadCase("step", name_of(request.step), right)


def file_name(text: str) -> str:
    """A file name without its ending: ``repro_`` and the text, without special characters."""
    return "repro_" + re.sub(r"[^\w.+-]+", "_", text).strip("_")[:150]


def _default_name(request: Request) -> str:
    """A file name that names the step, model, loss, layout, shards and dtype."""
    case = request.case
    parts = [name_of(request.step), name_of(case.model), name_of(case.loss)]
    parts += [case.layout, case.shards, case.dtype_name]
    if request.step_count > 1:
        parts.append(f"{request.step_count}steps")
    if request.compare == "update":
        parts.append("update")
    return file_name("-".join(parts))
