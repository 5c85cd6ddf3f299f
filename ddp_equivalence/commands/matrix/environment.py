"""A Python environment with the versions that are asked for."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.suite_folder import is_checkout, suite_folder
from ddp_equivalence.gate.surroundings import standard_name

LAST_LINES = 6
"""So many lines of an installer that failed are shown."""


class CannotInstall(Exception):
    """The requirements do not go together, or cannot be had. Says what the installer printed."""


class Environment:
    """``folder``: to make it in. ``on_top``: it has what this environment has, beside its own."""

    def __init__(self, folder: Path, on_top: bool) -> None:
        self._folder, self._on_top = folder, on_top

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self._folder / "bin" / "python"

    def make(self, requirements: Sequence[str], file: Path | None) -> None:
        """Make it, and install this package, the requirements and those in a file.

        Raises CannotInstall.
        """
        uv = None if self._on_top else shutil.which("uv")
        if uv is not None:
            self._install([uv, "venv", "--quiet", "--python", sys.executable, str(self._folder)])
            install = [uv, "pip", "install", "--quiet", "--python", str(self.python)]
        elif importlib.util.find_spec("pip") is not None:
            self._install([sys.executable, "-m", "venv", "--without-pip", str(self._folder)])
            pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
            install = [*pip, "install", "--quiet"]
        else:
            self._install([sys.executable, "-m", "venv", str(self._folder)])
            install = [str(self.python), "-m", "pip", "install", "--quiet"]
        if self._on_top:
            self._see_the_present_packages()
        needed = [*requirements, *([] if file is None else ["-r", str(file)])]
        self._install([*install, *needed, *([] if self._on_top else this_package(requirements))])

    def delete(self) -> None:
        """Delete it, if there is one; no other folder of that name."""
        if (self._folder / "pyvenv.cfg").is_file():
            shutil.rmtree(self._folder, ignore_errors=True)

    def _see_the_present_packages(self) -> None:
        """Its own packages come first, and hide those of the same name."""
        folders = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
        if not is_installed():
            lines.append(str(suite_folder()))
        of_its_own = next(self._folder.glob("lib/python*/site-packages"))
        (of_its_own / "present_environment.pth").write_text("\n".join(lines) + "\n")

    def _install(self, command: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        if run.returncode:
            lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
            told = [line for line in lines if not line.lower().startswith(("warning", "[notice]"))]
            raise CannotInstall("\n".join(told[-LAST_LINES:]))


def is_installed() -> bool:
    """False if this package is only found because of a variable, or the folder that one is in."""
    try:
        metadata.distribution("ddp_equivalence")
    except metadata.PackageNotFoundError:
        return False
    return True


def this_package(requirements: Sequence[str]) -> list[str]:
    """What an environment from nothing needs beside the requirements: this package, and the torch
    of this environment, unless the requirements name another one.
    """
    names = {standard_name(one.partition("==")[0]) for one in requirements}
    torch = [] if "torch" in names else [f"torch=={metadata.version('torch').partition('+')[0]}"]
    if is_checkout():
        return [*torch, str(suite_folder())]
    return [*torch, f"ddp_equivalence=={metadata.version('ddp_equivalence')}"]


def size_of_packages(names: Sequence[str], alone: bool = False) -> int:
    """How many bytes these packages take here, with all that they need, unless ``alone``: about
    what they take in another version.
    """
    known: set[str] = set()
    waiting = [*names]
    size = 0
    while waiting:
        name = standard_name(waiting.pop())
        if name in known:
            continue
        known.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        size += sum(file.size or 0 for file in found.files or ())
        needed = () if alone else found.requires or ()
        waiting += [_name_of(one) for one in needed if "extra ==" not in one]
    return size


def _name_of(requirement: str) -> str:
    end = next(
        (number for number, one in enumerate(requirement) if not (one.isalnum() or one in "-_.")),
        len(requirement),
    )
    return requirement[:end]


def free_bytes(folder: Path) -> int:
    """The room that is left where a folder is to be made."""
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    return shutil.disk_usage(nearest).free


def folder_for_environments(keep: Path | None) -> Path:
    """Where environments are made, one after the other."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        return keep.resolve()
    return Path(tempfile.mkdtemp(prefix="ddp_equivalence-matrix-"))


# Which versions are asked for, and which of a package there are.

NAME = r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)"
REQUIREMENT = re.compile(rf"^{NAME}(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9][\w.!+-]*$")
RANGE = re.compile(rf"^{NAME}==(?P<first>[\w.!-]+)\.\.(?P<last>[\w.!-]+)$")
RIGHT = "NAME==VERSION; a comma stands between alternatives, and & between what belongs together"
PRESENT = "present"
"""The environment that this process runs in."""

RIGHT_RANGE = "NAME==FIRST..LAST, such as transformers==4.45.2..4.47.1"


@dataclass(frozen=True)
class Wanted:
    """One environment. ``requirements``: such as ("torch==2.13.0", "transformers==4.46.1"); none
    for the environment that this process runs in.
    """

    requirements: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its folder, and of its record in reports."""
        return "+".join(self.requirements) or PRESENT

    @property
    def packages(self) -> tuple[str, ...]:
        """The names of its packages, as the packaging standard writes them, in their order."""
        return tuple(sorted(name for name, _ in self.versions))

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """The names, and the versions that are asked for."""
        pairs = (one.partition("==") for one in self.requirements)
        return tuple((standard_name(name), version) for name, _, version in pairs)

    def is_neighbour_of(self, other: Wanted) -> bool:
        """They have other versions of the same packages; all are neighbours of the present one."""
        is_present = not (self.requirements and other.requirements)
        return is_present or self.packages == other.packages


def wanted(texts: Sequence[str]) -> list[Wanted]:
    """What ``--with`` asks for. Raises BadCase."""
    found: list[Wanted] = []
    for text in texts:
        for alternative in text.split(","):
            if alternative == PRESENT:
                found.append(Wanted(()))
                continue
            requirements = tuple(one.strip() for one in alternative.split("&"))
            for one in requirements:
                if not REQUIREMENT.match(one):
                    raise BadCase("with", text, RIGHT)
            found.append(Wanted(requirements))
    twice = next((one for one in found if found.count(one) > 1), None)
    if twice is not None:
        raise BadCase("with", twice.name, "each environment once")
    if len(found) == 1:
        raise BadCase("with", found[0].name, f"two or more; {PRESENT} is the environment of now")
    return found


def between(text: str) -> list[Wanted]:
    """The releases from the first to the last that ``--bisect`` names. Raises BadCase."""
    match = RANGE.match(text)
    if match is None:
        raise BadCase("bisect", text, RIGHT_RANGE)
    name, first, last = match["name"], match["first"], match["last"]
    released = _released(name)
    for version in (first, last):
        if version not in released:
            known = ", ".join(released[-8:]) or "none"
            right = f"versions that the index has; {version} is none of them (the last are {known})"
            raise BadCase("bisect", text, right)
    begin, end = released.index(first), released.index(last)
    if begin >= end:
        right = f"a first version that is older than the last one; {RIGHT_RANGE}"
        raise BadCase("bisect", text, right)
    return [Wanted((f"{name}=={version}",)) for version in released[begin : end + 1]]


def _released(name: str) -> list[str]:
    """The versions that pip can find, the oldest first."""
    run = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", name], capture_output=True, text=True
    )
    for line in run.stdout.splitlines():
        if line.startswith("Available versions:"):
            return [one.strip() for one in line.partition(":")[2].split(",")][::-1]
    if "No module named pip" in run.stderr:
        right = "a Python with pip, which knows the releases of the index; this one has none"
        raise BadCase("bisect", sys.executable, right)
    last = (run.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
    raise BadCase("bisect", name, f"a package that the index has; pip says: {last}")
