"""``ddp-equivalence matrix``: the same checks under several versions, and what has changed.

``--bisect`` finds the release of a package that changed a verdict.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import (
    DIFFERENT,
    EXIT_CODE_OF_LEVEL,
    NOT_JUDGED,
    SAME,
    YELLOW,
)
from ddp_equivalence.commands.output import SECONDS_TO_END, exit_code_of
from ddp_equivalence.commands.record import add_checks, asked
from ddp_equivalence.commands.suite_folder import is_checkout, suite_folder
from ddp_equivalence.gate.record import NAME as NAME_OF_RECORD
from ddp_equivalence.gate.record import read_record, standard_name
from ddp_equivalence.report.text import painted, plural, require_writable_folder, write_file

if TYPE_CHECKING:
    from ddp_equivalence.gate.judge import Judgement, Policy

HELP = "record under several versions, and say what has changed between them"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments of the command."""
    parser.description = (
        "Make an environment for each of several versions, one after the other, record "
        "your checks in each, and hold neighbours against each other. Finished records are kept, "
        "so that the same command goes on where it was interrupted. Exit code 0: green, 1: red, 2: "
        "bad input, 3: an environment could not be made or a run was cut off, 4: yellow."
    )
    parser.add_argument(
        "--with",
        dest="with_",
        action="append",
        default=[],
        metavar="NAME==VERSION",
        help="an environment; a comma stands between alternatives, & between packages that belong "
        "together, and `present` for the environment of now; may be repeated",
    )
    parser.add_argument(
        "--bisect",
        metavar="NAME==FIRST..LAST",
        help="find the release between these two that changed a verdict",
    )
    add_checks(parser)
    parser.add_argument("--suite", action="store_true", help="run the suite as well")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("matrix"),
        metavar="DIR",
        help="the folder for the records; default %(default)s",
    )
    parser.add_argument(
        "--on-top",
        action="store_true",
        help="take the packages of this environment, and replace those that are named; by default "
        "each environment is made from nothing",
    )
    parser.add_argument(
        "-r",
        "--requirements",
        type=Path,
        metavar="FILE",
        help="a file with what your checks need beside torch, as for pip",
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="as for `gate`")
    parser.add_argument("--full", action="store_true", help="as for `gate`")


def run(arguments: argparse.Namespace) -> int:
    """Record, and print what has changed. Raises BadCase before anything is made."""
    from ddp_equivalence.gate.judge import read_policy

    if bool(arguments.with_) == bool(arguments.bisect):
        right = "given without --bisect, or --bisect without it"
        raise BadCase("with", ", ".join(arguments.with_) or None, right)
    if not (arguments.paths or arguments.observe or arguments.suite):
        raise BadCase("PATH", None, "checks of your own; or give --suite")
    file: Path | None = arguments.requirements
    if file is not None and not file.is_file():
        raise BadCase("requirements", str(file), "a file that exists")
    require_writable_folder("out", arguments.out)
    matrix = Matrix(arguments, read_policy(arguments.policy))
    if arguments.bisect:
        return matrix.bisect(between(arguments.bisect))
    return matrix.compare(wanted(arguments.with_))


# Which versions are asked for, and which of a package there are.

NAME = r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)"
REQUIREMENT = re.compile(rf"^{NAME}(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9][\w.!+-]*$")
RANGE = re.compile(rf"^{NAME}==(?P<first>[\w.!-]+)\.\.(?P<last>[\w.!-]+)$")
RIGHT = "NAME==VERSION; a comma stands between alternatives, and & between what belongs together"
RIGHT_RANGE = "NAME==FIRST..LAST, such as transformers==4.45.2..4.47.1"
PRESENT = "present"
"""The environment that this process runs in."""


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
    def versions(self) -> Mapping[str, str]:
        """Name as the packaging standard writes it -> the version that is asked for."""
        pairs = (one.partition("==") for one in self.requirements)
        return {standard_name(name): version for name, _, version in pairs}

    def is_neighbour_of(self, other: Wanted) -> bool:
        """They have other versions of the same packages; all are neighbours of the present one."""
        is_present = not (self.requirements and other.requirements)
        return is_present or self.versions.keys() == other.versions.keys()


def wanted(texts: Sequence[str]) -> list[Wanted]:
    """The environments that ``--with`` asks for. Raises BadCase."""
    found: list[Wanted] = []
    for text in texts:
        for alternative in text.split(","):
            together = () if alternative == PRESENT else alternative.split("&")
            requirements = tuple(one.strip() for one in together)
            if not all(map(REQUIREMENT.match, requirements)):
                raise BadCase("with", text, RIGHT)
            if Wanted(requirements) in found:
                raise BadCase("with", Wanted(requirements).name, "given once")
            found.append(Wanted(requirements))
    if len(found) == 1:
        raise BadCase("with", found[0].name, f"given with another one; {PRESENT} is that of now")
    return found


def between(text: str) -> list[Wanted]:
    """The releases from the first to the last that ``--bisect`` names. Raises BadCase."""
    match = RANGE.match(text)
    if match is None:
        raise BadCase("bisect", text, RIGHT_RANGE)
    released = _released(match["name"])
    for version in (match["first"], match["last"]):
        if version not in released:
            known = ", ".join(released[-8:]) or "none"
            right = f"of versions that the index has; {version} is none (the last are {known})"
            raise BadCase("bisect", text, right)
    begin, end = released.index(match["first"]), released.index(match["last"])
    if begin >= end:
        right = f"such that the first version is older than the last one: {RIGHT_RANGE}"
        raise BadCase("bisect", text, right)
    return [Wanted((f"{match['name']}=={one}",)) for one in released[begin : end + 1]]


def _released(name: str) -> list[str]:
    """The versions that pip can find, the oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    run = subprocess.run(command, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        if line.startswith("Available versions:"):
            return [one.strip() for one in line.partition(":")[2].split(",")][::-1]
    last = (run.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
    raise BadCase("bisect", name, f"a package that the index has; pip says: {last}")


# A Python environment with the versions that are asked for.

LAST_LINES = 6
"""So many lines of an installer that failed, or of a run that was cut off, are shown."""


class CannotInstall(Exception):
    """The requirements do not go together, or cannot be had. Says what the installer printed."""


def make_environment(
    folder: Path, requirements: Sequence[str], file: Path | None, on_top: bool
) -> Path:
    """Make it, with this package, the requirements and those in a file; return its interpreter.

    ``on_top``: it sees what this environment has, beside its own. Raises CannotInstall.
    """
    python = folder / "bin" / "python"
    uv = None if on_top else shutil.which("uv")
    if uv is not None:
        make = [uv, "venv", "--quiet", "--python", sys.executable]
        install = [uv, "pip", "install", "--python", str(python)]
    elif importlib.util.find_spec("pip") is not None:
        make = [sys.executable, "-m", "venv", "--without-pip"]
        install = [sys.executable, "-m", "pip", "--python", str(python), "install"]
    else:
        make = [sys.executable, "-m", "venv"]
        install = [str(python), "-m", "pip", "install"]
    _install([*make, str(folder)])
    if on_top:  # its own packages come first, and hide those of the same name
        kinds = ("purelib", "platlib")
        seen = [repr(one) for one in dict.fromkeys(map(sysconfig.get_path, kinds))]
        lines = [f"import site; site.addsitedir({one})" for one in seen]
        lines += [] if is_installed() else [str(suite_folder())]
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "present_environment.pth").write_text("\n".join(lines) + "\n")
    needed = [*requirements, *([] if file is None else ["-r", str(file)])]
    _install([*install, "--quiet", *needed, *([] if on_top else this_package(requirements))])
    return python


def _install(command: Sequence[str]) -> None:
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
    """The further packages of an environment from nothing: this one, and the torch
    of this environment, unless the requirements name another one.
    """
    names = {standard_name(one.partition("==")[0]) for one in requirements}
    torch = [] if "torch" in names else [f"torch=={metadata.version('torch').partition('+')[0]}"]
    if is_checkout():
        return [*torch, str(suite_folder())]
    return [*torch, f"ddp_equivalence=={metadata.version('ddp_equivalence')}"]


# The records under several versions, and what has changed between them.


class Matrix:
    """``arguments``: of the command line. ``failed``: name -> why there is no record."""

    def __init__(self, arguments: argparse.Namespace, policy: Policy) -> None:
        self._arguments, self._policy = arguments, policy
        self._out: Path = arguments.out
        self._failed: dict[str, str] = {}
        self._asked = asked(arguments)

    def compare(self, wanted: Sequence[Wanted]) -> int:
        """Record each, and hold those with the same packages against the one before."""
        for number, one in enumerate(wanted, start=1):
            self._record(one, f"{number} of {len(wanted)}")
        recorded = [one for one in wanted if self._is_recorded(one)]
        levels: list[str] = []
        for number, after in enumerate(recorded):
            earlier = [one for one in recorded[:number] if one.is_neighbour_of(after)]
            if earlier:
                levels.append(self._print(self._judged(earlier[-1], after)))
        self._say_what_failed()
        if not levels:
            print("\nNothing was held against anything.")
        codes = {EXIT_CODE_OF_LEVEL[level] for level in levels}
        codes |= {NOT_JUDGED} if self._failed or not levels else set()
        return next(one for one in (DIFFERENT, NOT_JUDGED, YELLOW, SAME) if one in codes)

    def bisect(self, released: Sequence[Wanted]) -> int:
        """Find the first release that is red beside the first of all."""
        first, last = released[0], released[-1]
        for one in (first, last):
            self._record(one, f"{len(released)} releases to look through")
        if not (self._is_recorded(first) and self._is_recorded(last)):
            self._say_what_failed()
            return NOT_JUDGED
        if self._verdicts_alike(first, last):
            print(f"\n{last.name} has the verdicts of {first.name}: there is nothing to look for.")
            return EXIT_CODE_OF_LEVEL[self._print(self._judged(first, last))]
        good, bad, untried = 0, len(released) - 1, set[int]()
        while choices := [n for n in range(good + 1, bad) if n not in untried]:
            middle = choices[len(choices) // 2]
            one = released[middle]
            self._record(one, f"{len(choices)} {plural(len(choices), 'release')} left to try")
            if not self._is_recorded(one):
                untried.add(middle)
            elif self._verdicts_alike(first, one):
                good = middle
            else:
                bad = middle
        print(f"\n{released[bad].name} is the first release with other verdicts.")
        print(f"{released[good].name} is the last one before it that has those of {first.name}.")
        for number in sorted(n for n in untried if good < n < bad):
            print(f"Nothing is known of {released[number].name}")
        self._say_what_failed()
        self._print(self._judged(released[good], released[bad]))
        return DIFFERENT

    def _verdicts_alike(self, first: Wanted, other: Wanted) -> bool:
        kinds = (
            *("verdict_worse", "verdict_better", "test_failed", "test_passes", "cause_changed"),
            *("vanished", "stopped_running", "nothing_compared", "incomplete", "compared_less"),
        )
        seen = [one.seen for one in self._judged(first, other).findings if one.level != "ignored"]
        of_first = {one.kind for one in seen if one.of == first.name}  # such as that it is empty
        return not any(
            one.kind in kinds and one.of != first.name and one.kind not in of_first for one in seen
        )

    def _say_what_failed(self) -> None:
        for name, why in self._failed.items():
            print(f"\n{name}: NOT RECORDED")
            print("\n".join(f"  {line}" for line in why.splitlines()))

    def _judged(self, before: Wanted, after: Wanted) -> Judgement:
        from ddp_equivalence.gate.judge import judge

        old, new = (read_record(self._out / one.name) for one in (before, after))
        return judge(old, new, self._policy, datetime.date.today())

    def _print(self, judgement: Judgement) -> str:
        """Print the report, and return the level."""
        from ddp_equivalence.gate.outputs import report

        text = painted(report(judgement, self._arguments.full), sys.stdout)
        print(f"\n{text}", end="", flush=True)
        return judgement.level

    def _is_recorded(self, one: Wanted) -> bool:
        """It is recorded, whole, and of what is asked for now."""
        try:
            found = read_record(self._out / one.name)
            made_as = json.loads(self._beside(one, "made_as.json").read_text())
        except (BadCase, OSError, ValueError):
            return False
        whole = found.end is not None and found.facts.get("asked") == self._asked
        return whole and made_as == self._how(one)

    def _beside(self, one: Wanted, ending: str) -> Path:
        return self._out / f"{one.name}.{ending}"

    def _how(self, one: Wanted) -> dict[str, Any]:
        """All that decides what an environment holds, beside its name."""
        from ddp_equivalence.gate.surroundings import packages, source_digest

        file, on_top = self._arguments.requirements, self._arguments.on_top
        sees_present = on_top or not one.requirements
        return {
            "on_top": on_top,
            "requirements": "" if file is None else file.read_text(),
            "source": source_digest(suite_folder()),
            "present": packages() if sees_present else {},
        }

    def _record(self, one: Wanted, place: str) -> None:
        """Make the environment and the record, unless it is recorded. ``place``: for the reader."""
        if self._is_recorded(one):
            folder = self._out / one.name
            print(f"{one.name} ({place}): recorded before, in {folder}", flush=True)
            return
        if not one.requirements:
            self._run(one, sys.executable)
            return
        print(f"{one.name} ({place}): installing", flush=True)
        given = self._arguments
        with tempfile.TemporaryDirectory(
            prefix="ddp_equivalence-matrix-", ignore_cleanup_errors=True
        ) as temporary:
            folder = Path(temporary).resolve() / one.name
            try:
                python = make_environment(
                    folder, one.requirements, given.requirements, given.on_top
                )
            except CannotInstall as error:
                self._failed[one.name] = str(error)
                print(f"{one.name} ({place}): could not be installed", flush=True)
            else:
                print(f"{one.name} ({place}): installed, recording", flush=True)
                self._run(one, str(python))

    def _run(self, one: Wanted, python: str) -> None:
        given = self._arguments
        folder, log = self._out / one.name, self._beside(one, "txt")
        self._clear(folder)
        self._out.mkdir(parents=True, exist_ok=True)
        words = [
            *(python, "-m", "ddp_equivalence", "record", str(folder)),
            *(["-n", given.n] if given.n != "0" else []),
            *(["-k", given.k] if given.k else []),
            *([] if given.suite else ["--no-suite"]),
            *(["--all"] if given.all else []),
            *(word for command in given.observe for word in ("--observe", command)),
            *given.paths,
        ]
        started = time.monotonic()
        with log.open("wb") as output:
            code = exit_code_of(words, output=output, seconds_to_end=2 * SECONDS_TO_END)
        seconds = time.monotonic() - started
        says = {SAME: "everything passed", DIFFERENT: "something failed"}
        print(f"{one.name}: {says.get(code, 'cut off')} in {seconds:.0f} s ({log})", flush=True)
        write_file(self._beside(one, "made_as.json"), json.dumps(self._how(one)))
        if not self._is_recorded(one):
            printed = log.read_text(errors="replace").strip().splitlines()
            self._failed[one.name] = "\n".join(printed[-LAST_LINES:])
        elif wrong := self._other_versions(one):
            self._failed[one.name] = wrong
            self._beside(one, "made_as.json").unlink()

    def _clear(self, folder: Path) -> None:
        """Delete what an interrupted run has left, and nothing else."""
        if not folder.exists():
            return
        inside = [path.name for path in folder.iterdir()] if folder.is_dir() else ["a file"]
        if set(inside) - {NAME_OF_RECORD}:
            right = f"a folder with no {folder.name} in it, or one that holds a record alone"
            raise BadCase("out", str(self._out), right)
        shutil.rmtree(folder)

    def _other_versions(self, one: Wanted) -> str:
        """Says which version ran although another one was asked for; "" if none did."""
        environment = read_record(self._out / one.name).environment
        found = environment["packages"]
        wrong = [
            f"{name} of this folder is imported, and not the package: call `matrix` elsewhere"
            for name in one.versions
            if name in environment["hidden"]
        ]
        wrong += [
            f"{name} {version} was asked for, and {found.get(name, 'none')} ran: is another one "
            "found first, such as by PYTHONPATH?"
            for name, version in one.versions.items()
            if str(found.get(name)).partition("+")[0] != version.partition("+")[0]
        ]
        return "\n".join(wrong)
