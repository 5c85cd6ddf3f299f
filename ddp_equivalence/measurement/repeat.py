"""The command that repeats a check of a user's own step."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING

from ddp_equivalence.ranks.importable import belongs_to_user

if TYPE_CHECKING:
    from ddp_equivalence.measurement.request import Request


def repeating_command(request: Request) -> str:
    """The command that finds this case and step in their file, or runs the user's script again.

    "" if there is neither a file nor a script.
    """
    step = request.step
    module = sys.modules.get(getattr(step, "__module__", None) or "")
    name, file = getattr(step, "__name__", ""), getattr(module, "__file__", None)
    is_found = getattr(module, name, None) is step and getattr(module, "case", None) is request.case
    if name and file and is_found and getattr(module, "__name__", "") != "__main__":
        return f"ddp-equivalence check {_of_file(file, name, request)}"
    return _script()


def _of_file(file: str, name: str, request: Request) -> str:
    words = [f"{_short_path(file)}:{name}"]
    if request.compare != "gradients":
        words += ["--compare", request.compare]
    if isinstance(request.steps, int) and request.steps != 1:
        words += ["--steps", str(request.steps)]
    if request.compare == "update" and request.lr != 0.1:
        words += ["--lr", f"{request.lr:g}"]
    return shlex.join(words)


def _script() -> str:
    """The user's script that is running; "" in a notebook, and under a program of others."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if not file or not belongs_to_user(file):
        return ""
    program = [_short_path(file)] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    return shlex.join(["python", *program, *sys.argv[1:]])


def _short_path(file: str) -> str:
    """From the working folder, if the file lies below it."""
    path = os.path.relpath(file)
    return os.path.abspath(file) if path.startswith(os.pardir) else path
