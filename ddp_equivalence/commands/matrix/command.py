"""``ddp-equivalence matrix``: the same checks under several versions, and what has changed between.

``--bisect`` finds the release of a package that changed a verdict.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME, YELLOW
from ddp_equivalence.commands.record.asked import asked
from ddp_equivalence.commands.results import require_writable_folder
from ddp_equivalence.report.terminal import painted
from ddp_equivalence.report.wrapping import plural

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.matrix.versions import Wanted
    from ddp_equivalence.gate.judge import Judgement
    from ddp_equivalence.gate.policy import Policy

GIB = 1 << 30


def add(commands: Commands) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "matrix",
        help="record under several versions, and say what has changed between them",
        description="Make an environment for each of several versions, one after the other, record "
        "your checks in each, and hold neighbours against each other. Finished records are kept, "
        "so that the same command goes on where it was interrupted. Exit code 0: green, 1: red, 2: "
        "bad input, 3: an environment could not be made or a run was cut off, 4: yellow.",
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
    parser.add_argument("paths", metavar="PATH", nargs="*", help="your own checks, as for `record`")
    parser.add_argument(
        "--observe", action="append", default=[], metavar="COMMAND", help="as for `record`"
    )
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
    parser.add_argument(
        "--keep-environments",
        type=Path,
        metavar="DIR",
        help="make them here, and keep them",
    )
    parser.add_argument("--policy", type=Path, metavar="FILE", help="as for `gate`")
    parser.add_argument("-n", default="0", metavar="N", help="as for `record`")
    parser.add_argument("-k", default="", metavar="WORDS", help="as for `record`")


def run(arguments: argparse.Namespace) -> int:
    """Record, and print what has changed. Raises BadCase before anything is made."""
    from ddp_equivalence.commands.matrix import versions
    from ddp_equivalence.gate.policy import read_policy

    if bool(arguments.with_) == bool(arguments.bisect):
        raise BadCase("with", arguments.with_, "either --with or --bisect")
    if not (arguments.paths or arguments.observe or arguments.suite):
        raise BadCase("PATH", "", "checks of your own, or --suite")
    file: Path | None = arguments.requirements
    if file is not None and not file.is_file():
        raise BadCase("requirements", str(file), "a file that exists")
    require_writable_folder("out", arguments.out)
    policy = read_policy(arguments.policy)
    if arguments.bisect:
        return _Matrix(arguments, policy).bisect(versions.between(arguments.bisect))
    return _Matrix(arguments, policy).compare(versions.wanted(arguments.with_))


class _Matrix:
    """``arguments``: of the command line."""

    def __init__(self, arguments: argparse.Namespace, policy: Policy) -> None:
        self._arguments, self._policy = arguments, policy
        self._out: Path = arguments.out
        self._failed: dict[str, str] = {}
        self._asked = asked(
            arguments.paths, arguments.observe, arguments.k, with_suite=arguments.suite
        )

    # --- many versions

    def compare(self, wanted: Sequence[Wanted]) -> int:
        """Record each, and hold those with the same packages against the one before."""
        self._say_what_is_needed(wanted)
        for number, one in enumerate(wanted, start=1):
            self._record(one, f"{number} of {len(wanted)}")
        levels = []
        recorded = [one for one in wanted if self._is_recorded(one)]
        for before, after in pairwise(recorded):
            if before.is_neighbour_of(after):
                judgement = self._judged(before, after)
                self._print(judgement)
                levels.append(judgement.level)
        for name, why in self._failed.items():
            print(f"\n{name}: NOT RECORDED\n{_indented(why)}")
        if "red" in levels:
            return DIFFERENT
        if self._failed:
            return NOT_JUDGED
        return YELLOW if "yellow" in levels else SAME

    # --- the release that changed a verdict

    def bisect(self, released: Sequence[Wanted]) -> int:
        """Find the first release that is red beside the first of all."""
        self._say_what_is_needed(released[:1])
        first, last = released[0], released[-1]
        for one in (first, last):
            self._record(one, f"{len(released)} releases to look through")
        if not (self._is_recorded(first) and self._is_recorded(last)):
            return self._gives_up()
        if self._verdicts_alike(first, last):
            print(f"\n{last.name} has the verdicts of {first.name}: there is nothing to look for.")
            self._print(self._judged(first, last))
            return SAME
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
            print(f"Not tried, since it could not be installed: {released[number].name}")
        self._print(self._judged(released[good], released[bad]))
        return DIFFERENT

    def _verdicts_alike(self, first: Wanted, other: Wanted) -> bool:
        kinds = ("verdict_worse", "verdict_better", "test_failed", "test_passes", "cause_changed")
        findings = self._judged(first, other).findings
        return not any(one.seen.kind in kinds and one.level != "ignored" for one in findings)

    def _gives_up(self) -> int:
        for name, why in self._failed.items():
            print(f"\n{name}: NOT RECORDED\n{_indented(why)}")
        return NOT_JUDGED

    # --- one version

    def _folder(self, one: Wanted) -> Path:
        return self._out / one.name

    def _is_recorded(self, one: Wanted) -> bool:
        from ddp_equivalence.gate.recorded import read_record

        if not self._folder(one).is_dir():
            return False
        try:
            found = read_record(self._folder(one))
        except BadCase:
            return False
        return found.end is not None and found.facts.get("asked") == self._asked

    def _record(self, one: Wanted, place: str) -> None:
        from ddp_equivalence.commands.matrix.environment import (
            CannotInstall,
            Environment,
            folder_for_environments,
        )

        if self._is_recorded(one):
            print(f"{one.name} ({place}): recorded before, in {self._folder(one)}", flush=True)
            return
        if not one.requirements:
            self._run(one, sys.executable)
            return
        print(f"{one.name} ({place}): installing", flush=True)
        started = time.monotonic()
        keep: Path | None = self._arguments.keep_environments
        base = folder_for_environments(keep)
        environment = Environment(base / one.name, self._arguments.on_top)
        try:
            environment.delete()
            environment.make(one.requirements, self._arguments.requirements)
            installed = time.monotonic() - started
            print(f"{one.name} ({place}): installed in {installed:.0f} s, recording", flush=True)
            self._run(one, str(environment.python))
        except CannotInstall as error:
            self._failed[one.name] = str(error)
            print(f"{one.name} ({place}): could not be installed", flush=True)
        finally:
            if keep is None:
                shutil.rmtree(base, ignore_errors=True)

    def _run(self, one: Wanted, python: str) -> None:
        given = self._arguments
        folder, log = self._folder(one), self._out / f"{one.name}.txt"
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted run has left
        self._out.mkdir(parents=True, exist_ok=True)
        words = [
            *(python, "-m", "ddp_equivalence", "record", str(folder)),
            *(["-n", given.n] if given.n != "0" else []),
            *(["-k", given.k] if given.k else []),
            *([] if given.suite else ["--no-suite"]),
            *(word for command in given.observe for word in ("--observe", command)),
            *given.paths,
        ]
        started = time.monotonic()
        with log.open("wb") as output:
            code = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT).returncode
        seconds = time.monotonic() - started
        says = {SAME: "everything passed", DIFFERENT: "something failed"}
        print(f"{one.name}: {says.get(code, 'cut off')} in {seconds:.0f} s ({log})", flush=True)
        if not self._is_recorded(one):
            printed = log.read_text(errors="replace").strip().splitlines()
            self._failed[one.name] = "\n".join(printed[-6:])

    # --- what is printed

    def _say_what_is_needed(self, wanted: Sequence[Wanted]) -> None:
        from ddp_equivalence.commands.matrix.environment import free_bytes, size_of_packages

        names = {name for one in wanted for name in one.packages}
        on_top = self._arguments.on_top
        names |= set() if on_top else {"torch", "ddp-equivalence"}
        kept = self._arguments.keep_environments is not None
        size, free = size_of_packages(sorted(names), alone=on_top), free_bytes(self._out.resolve())
        many = f"{len(wanted)} {plural(len(wanted), 'environment')}, each"
        many = "Environments" if self._arguments.bisect else many
        how = "which are kept" if kept else "one at a time"
        room = f"about {size / GIB:.1f} GiB as the packages take here"
        print(f"{many} of {room}, {how}; {free / GIB:.0f} GiB are free", flush=True)

    def _judged(self, before: Wanted, after: Wanted) -> Judgement:
        from ddp_equivalence.gate.judge import judge
        from ddp_equivalence.gate.recorded import read_record

        old, new = read_record(self._folder(before)), read_record(self._folder(after))
        return judge(old, new, self._policy, datetime.date.today())

    def _print(self, judgement: Judgement) -> None:
        from ddp_equivalence.gate.text import report

        print(f"\n{painted(report(judgement), sys.stdout)}", end="", flush=True)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
