"""What a check costs here and in other ways to test on several ranks, over a floor without any.

    python benchmarks/speed.py [--ranks 2 4 8] [--checks 200] [--slow-checks 5] [--rounds 3]

Every row does the same check: DDP's gradients of a small model on every rank against one big batch,
in float64, on gloo. The floor is bare ranks that do nothing else; what each row does is said in its
file in ``benchmarks/speed_worlds``. Times run from the start of a check to the start of the next.
Fast rows take turns with the floor, ``--rounds`` times, and their ratio is the median of the
rounds' own; slow rows make ``--slow-checks``, once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from measured_process import (
    BENCHMARKS,
    Finished,
    WorldFailed,
    end_with_sigterm,
    machine,
    run_world,
    whole_number,
)

EXAMPLES = 16
"""Of the big batch; it is dealt to the ranks in equal shards."""

SECONDS_TO_START = 120.0
SECONDS_A_CHECK = 60.0
"""No world may take longer: then it hangs, and is a failure."""


@dataclass(frozen=True)
class Harness:
    """A way to run the checks. ``world``: its file; ``needs``: packages beside torch and pytest."""

    name: str
    world: str
    options: tuple[str, ...] = ()
    slow: bool = False
    needs: tuple[str, ...] = ()

    @property
    def drop(self) -> int:
        """First checks that do not count."""
        return 1 if self.slow else 5

    @property
    def file(self) -> str:
        """Its name where it runs: to pytest it is a file of tests like any other."""
        return f"{self.world}.py" if self is FLOOR else f"test_{self.world}.py"

    @property
    def files(self) -> dict[str, Path]:
        """What lies in its folder."""
        worlds = BENCHMARKS / "speed_worlds"
        around = {name: worlds / name for name in ("the_check.py", "record_times.py", "bare.py")}
        return around | {self.file: worlds / f"{self.world}.py"}

    @property
    def arguments(self) -> tuple[str, ...]:
        """What python is given."""
        if self is FLOOR:
            return (self.file,)
        plugins = ("-p", "record_times", "-p", "no:cacheprovider")
        return ("-m", "pytest", *plugins, *self.options, self.file)


SUITE = ("-p", "ddp_equivalence.pytest_plugin")
INTERNAL = ("expecttest",)  # what torch's internal test classes import

FLOOR = Harness("bare ranks (the floor)", "bare")
WARM = Harness("this suite", "suite", SUITE)
HARNESSES = (
    FLOOR,
    Harness("bare ranks under pytest", "bare_under_pytest"),
    WARM,
    Harness("MultiProcContinuousTest", "multi_proc_continuous_test", needs=INTERNAL),
    Harness("this suite --fresh-ranks", "suite", (*SUITE, "--fresh-ranks"), slow=True),
    Harness("MultiProcessTestCase", "multi_process_test_case", slow=True, needs=INTERNAL),
    Harness("mp.spawn in every test", "spawn_per_test", slow=True),
    Harness("Pool in every test", "pool_per_test", slow=True),
)


@dataclass
class Row:
    """What was measured of a harness at a number of ranks. Seconds, by round."""

    ranks: int
    harness: str
    checks: list[list[float]] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    trouble: str = ""

    @property
    def every(self) -> list[float]:
        return sorted(seconds for one in self.checks for seconds in one)


def run(harness: Harness, ranks: int, total: int) -> Finished:
    """Run so many checks in a harness, once. Raises WorldFailed if not every one passed."""
    limit = SECONDS_TO_START + total * SECONDS_A_CHECK
    settings = {"RANKS": ranks, "CHECKS": total}
    finished = run_world(harness.files, harness.arguments, settings, limit)
    if finished.result["passed"] != total:
        raise WorldFailed(f"{finished.result['passed']} of {total} checks passed")
    return finished


def total_for(harness: Harness, counted: int) -> int:
    """Those that count, those before, and one whose start ends the last."""
    return harness.drop + counted + 1


def between_starts(harness: Harness, finished: Finished) -> list[float]:
    """The seconds of every check that counts."""
    starts = finished.result["starts"][harness.drop :]
    return [after - before for before, after in pairwise(starts)]


def measure(
    harnesses: tuple[Harness, ...], ranks: int, checks: int, slow_checks: int, rounds: int
) -> list[Row]:
    """All rows at a number of ranks; fast ones in turns, so that a busy minute meets them all."""
    rows = {harness: Row(ranks, harness.name) for harness in harnesses}
    for harness in _turns(harnesses, rounds):
        row = rows[harness]
        missing = [name for name in harness.needs if find_spec(name) is None]
        if missing:
            row.trouble = f"NOT RUN: needs {', '.join(missing)} (the extra 'benchmarks')"
        if row.trouble:
            continue
        _say(f"{ranks} ranks: {harness.name}")
        counted = slow_checks if harness.slow else checks
        try:
            finished = run(harness, ranks, total_for(harness, counted))
        except WorldFailed as error:
            row.trouble = f"FAILED: {str(error).splitlines()[-1]}"
            _say(str(error))
            continue
        row.checks.append(between_starts(harness, finished))
        row.cold.append(finished.result["first_comparison"] - finished.started)
    return list(rows.values())


def _turns(harnesses: tuple[Harness, ...], rounds: int) -> Iterator[Harness]:
    for _ in range(rounds):
        yield from (harness for harness in harnesses if not harness.slow)
    yield from (harness for harness in harnesses if harness.slow)


def _say(text: str) -> None:
    """What goes on, beside the table."""
    print(text, file=sys.stderr, flush=True)


HEAD = (
    "ranks  harness                       checks     median        90%  over floor  (by round)"
    "    first comparison"
)


def lines(rows: list[Row]) -> Iterator[str]:
    """The table of one number of ranks."""
    floor = rows[0]
    for row in rows:
        start = f"{row.ranks:>5}  {row.harness:<26}"
        if row.trouble:
            yield f"{start}  {row.trouble}"
            continue
        every = row.every
        ratios = _over(row, floor)
        ratio = f"{median(ratios):.2f}" if ratios else ""
        by_round = f"({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
        yield (
            f"{start}{len(every):>10}{_time(median(every)):>11}{_time(_ninth_tenth(every)):>11}"
            f"{ratio:>12}  {by_round:<12}{median(row.cold):>15.1f} s"
        )


def _over(row: Row, floor: Row) -> list[float]:
    """The medians over those of the floor: round by round, so that both met the same machine."""
    if not floor.checks:
        return []
    if len(row.checks) != len(floor.checks):
        return [median(row.every) / median(floor.every)]
    pairs = zip(row.checks, floor.checks, strict=True)
    return [median(own) / median(bare) for own, bare in pairs]


def _ninth_tenth(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def main() -> int:
    """Print the table; 1 if a harness failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=whole_number(1), nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--checks", type=whole_number(1), default=200, help="of a fast row, a round"
    )
    parser.add_argument("--slow-checks", type=whole_number(0), default=5, help="0: no slow rows")
    parser.add_argument("--rounds", type=whole_number(1), default=3)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write every time measured")
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        if EXAMPLES % ranks:
            parser.error(f"--ranks {ranks}: a number that divides the {EXAMPLES} examples")
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no such folder")
    end_with_sigterm()
    print(machine())
    print(HEAD, flush=True)
    harnesses = tuple(one for one in HARNESSES if arguments.slow_checks or not one.slow)
    every = []
    for ranks in arguments.ranks:
        rows = measure(harnesses, ranks, arguments.checks, arguments.slow_checks, arguments.rounds)
        print("\n".join(lines(rows)), flush=True)
        every += rows
    if arguments.json:
        found = {"machine": machine(), "rows": [vars(row) for row in every]}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row.trouble.startswith("FAILED") for row in every))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
