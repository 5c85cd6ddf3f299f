"""``ddp-equivalence matrix``: the same checks under several versions, and what has changed."""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME, YELLOW
from ddp_equivalence.commands.output import SECONDS_TO_END, exit_code_of, require_writable_folder
from ddp_equivalence.commands.record.command import asked, part_of_suite
from ddp_equivalence.commands.suite_folder import suite_folder
from ddp_equivalence.report.text import painted, plural

if TYPE_CHECKING:
    from ddp_equivalence.commands import Commands
    from ddp_equivalence.commands.matrix.environment import Wanted
    from ddp_equivalence.gate.judge import Judgement, Policy


# ``ddp-equivalence matrix``: the same checks under several versions, and what has changed
# between.
#
# ``--bisect`` finds the release of a package that changed a verdict.

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
    parser.add_argument("--all", action="store_true", help="with --suite, as for `record`")
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
    from ddp_equivalence.commands.matrix import environment
    from ddp_equivalence.gate.judge import read_policy

    if bool(arguments.with_) == bool(arguments.bisect):
        raise BadCase("with", ", ".join(arguments.with_), "either --with or --bisect, and not both")
    if not (arguments.paths or arguments.observe or arguments.suite):
        raise BadCase("PATH", "", "checks of your own, or --suite")
    file: Path | None = arguments.requirements
    if file is not None and not file.is_file():
        raise BadCase("requirements", str(file), "a file that exists")
    require_writable_folder("out", arguments.out)
    policy = read_policy(arguments.policy)
    if arguments.bisect:
        return _Matrix(arguments, policy).bisect(environment.between(arguments.bisect))
    return _Matrix(arguments, policy).compare(environment.wanted(arguments.with_))


class _Matrix:
    """``arguments``: of the command line."""

    def __init__(self, arguments: argparse.Namespace, policy: Policy) -> None:
        self._arguments, self._policy = arguments, policy
        self._recordings = Recordings(arguments)

    # --- many versions

    def compare(self, wanted: Sequence[Wanted]) -> int:
        """Record each, and hold those with the same packages against the one before."""
        self._say_what_is_needed(wanted)
        for number, one in enumerate(wanted, start=1):
            self._recordings.record(one, f"{number} of {len(wanted)}")
        recorded = [one for one in wanted if self._recordings.is_recorded(one)]
        levels: list[str] = []
        for number, after in enumerate(recorded):
            earlier = [one for one in recorded[:number] if one.is_neighbour_of(after)]
            if earlier:
                levels.append(self._print(self._judged(earlier[-1], after)))
        self._say_what_failed()
        if "red" in levels:
            return DIFFERENT
        if self._recordings.failed or not levels:
            print("" if levels else "\nNothing was held against anything.", end="")
            return NOT_JUDGED
        return _exit_code(levels)

    # --- the release that changed a verdict

    def bisect(self, released: Sequence[Wanted]) -> int:
        """Find the first release that is red beside the first of all."""
        self._say_what_is_needed(released[:1])
        first, last = released[0], released[-1]
        for one in (first, last):
            self._recordings.record(one, f"{len(released)} releases to look through")
        if not (self._recordings.is_recorded(first) and self._recordings.is_recorded(last)):
            self._say_what_failed()
            return NOT_JUDGED
        if self._verdicts_alike(first, last):
            print(f"\n{last.name} has the verdicts of {first.name}: there is nothing to look for.")
            return _exit_code([self._print(self._judged(first, last))])
        good, bad, untried = 0, len(released) - 1, set[int]()
        while choices := [n for n in range(good + 1, bad) if n not in untried]:
            middle = choices[len(choices) // 2]
            one = released[middle]
            self._recordings.record(
                one, f"{len(choices)} {plural(len(choices), 'release')} left to try"
            )
            if not self._recordings.is_recorded(one):
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
        for name, why in self._recordings.failed.items():
            print(f"\n{name}: NOT RECORDED\n{_indented(why)}")

    # --- what is printed

    def _say_what_is_needed(self, wanted: Sequence[Wanted]) -> None:
        from ddp_equivalence.commands.matrix.environment import free_bytes, size_of_packages

        names = {name for one in wanted for name in one.packages}
        on_top = self._arguments.on_top
        names |= set() if on_top else {"torch", "ddp-equivalence"}
        kept = self._arguments.keep_environments is not None
        where = self._arguments.keep_environments or Path(tempfile.gettempdir())
        size, free = size_of_packages(sorted(names), alone=on_top), free_bytes(where)
        many = f"{len(wanted)} {plural(len(wanted), 'environment')}, each"
        many = "Environments" if self._arguments.bisect else many
        how = "which are kept" if kept else "one at a time"
        gigabytes = f"{size / GIB:.1f} GiB" if size > GIB / 10 else f"{size >> 20} MiB"
        room = f"about {gigabytes}, which is what the packages take here"
        print(f"{many} of {room}, {how}; {free / GIB:.0f} GiB are free", flush=True)

    def _judged(self, before: Wanted, after: Wanted) -> Judgement:
        from ddp_equivalence.gate.judge import judge
        from ddp_equivalence.gate.record import read_record

        old, new = (
            read_record(self._recordings.folder(before)),
            read_record(self._recordings.folder(after)),
        )
        return judge(old, new, self._policy, datetime.date.today())

    def _print(self, judgement: Judgement) -> str:
        """Print the report, and return the level."""
        from ddp_equivalence.gate.outputs import report

        print(f"\n{painted(report(judgement), sys.stdout)}", end="", flush=True)
        return judgement.level


def _exit_code(levels: Sequence[str]) -> int:
    if "red" in levels:
        return DIFFERENT
    return YELLOW if "yellow" in levels else SAME


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# The records under several versions, each made in an environment of its own.


class Recordings:
    """``arguments``: of the command line. ``failed``: name -> why there is no record."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self.failed: dict[str, str] = {}
        self._asked = asked(
            arguments.paths,
            arguments.observe,
            arguments.k,
            part_of_suite(is_run=arguments.suite, whole=arguments.all or bool(arguments.k)),
        )

    def is_recorded(self, one: Wanted) -> bool:
        """It is recorded, whole, and of what is asked for now."""
        from ddp_equivalence.gate.record import read_record

        try:
            found = read_record(self.folder(one))
            made_as = json.loads(self._made_as(one).read_text())
        except (BadCase, OSError, ValueError):
            return False
        whole = found.end is not None and found.facts.get("asked") == self._asked
        return whole and made_as == self._how(one)

    def _made_as(self, one: Wanted) -> Path:
        return self._out / f"{one.name}.made_as.json"

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

    def folder(self, one: Wanted) -> Path:
        """Where its record is, or will be."""
        return self._out / one.name

    def record(self, one: Wanted, place: str) -> None:
        """Make the environment and the record, unless it is recorded. ``place``: for the reader."""
        from ddp_equivalence.commands.matrix.environment import (
            CannotInstall,
            Environment,
            folder_for_environments,
        )

        if self.is_recorded(one):
            print(f"{one.name} ({place}): recorded before, in {self.folder(one)}", flush=True)
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
            self.failed[one.name] = str(error)
            print(f"{one.name} ({place}): could not be installed", flush=True)
        finally:
            if keep is None:
                shutil.rmtree(base, ignore_errors=True)

    def _run(self, one: Wanted, python: str) -> None:
        given = self._arguments
        folder, log = self.folder(one), self._out / f"{one.name}.txt"
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
        self._made_as(one).write_text(json.dumps(self._how(one)))
        if not self.is_recorded(one):
            printed = log.read_text(errors="replace").strip().splitlines()
            self.failed[one.name] = "\n".join(printed[-6:])
        elif wrong := self._other_versions(one):
            self.failed[one.name] = wrong
            self._made_as(one).unlink()

    def _clear(self, folder: Path) -> None:
        """Delete what an interrupted run has left, and nothing else."""
        from ddp_equivalence.gate.record import NAME

        if not folder.exists():
            return
        inside = [path.name for path in folder.iterdir()] if folder.is_dir() else ["a file"]
        if set(inside) - {NAME}:
            right = f"a folder with no {folder.name} in it, or one that holds a record alone"
            raise BadCase("out", str(self._out), right)
        shutil.rmtree(folder)

    def _other_versions(self, one: Wanted) -> str:
        """What ran although another version was asked for; "" if nothing did."""
        from ddp_equivalence.gate.record import read_record

        environment = read_record(self.folder(one)).environment
        found = environment["packages"]
        hidden = [name for name, _ in one.versions if name in environment["hidden"]]
        wrong = [
            f"{name} of this folder is imported, and not the package: call `matrix` elsewhere"
            for name in hidden
        ]
        wrong += [
            f"{name} {version} was asked for, and {found.get(name, 'none')} ran: is another one "
            "found first, such as by PYTHONPATH?"
            for name, version in one.versions
            if str(found.get(name)).partition("+")[0] != version.partition("+")[0]
        ]
        return "\n".join(wrong)
