"""``ddp-equivalence matrix``: the same checks under several versions, and what has changed between.

``--bisect`` finds the release of a package that changed a verdict.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.exit_codes import DIFFERENT, NOT_JUDGED, SAME, YELLOW
from ddp_equivalence.commands.matrix.recordings import Recordings
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
    from ddp_equivalence.commands.matrix import versions
    from ddp_equivalence.gate.policy import read_policy

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
        return _Matrix(arguments, policy).bisect(versions.between(arguments.bisect))
    return _Matrix(arguments, policy).compare(versions.wanted(arguments.with_))


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
        from ddp_equivalence.gate.recorded import read_record

        old, new = (
            read_record(self._recordings.folder(before)),
            read_record(self._recordings.folder(after)),
        )
        return judge(old, new, self._policy, datetime.date.today())

    def _print(self, judgement: Judgement) -> str:
        """Print the report, and return the level."""
        from ddp_equivalence.gate.text import report

        print(f"\n{painted(report(judgement), sys.stdout)}", end="", flush=True)
        return judgement.level


def _exit_code(levels: Sequence[str]) -> int:
    if "red" in levels:
        return DIFFERENT
    return YELLOW if "yellow" in levels else SAME


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
