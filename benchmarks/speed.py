"""The time of a check with this suite and with other test harnesses, over bare ranks.

    python benchmarks/speed.py [--ranks 2 4 8] [--checks 200] [--slow-checks 5] [--rounds 3]

Every row does the same check: DDP's gradients of a small model on every rank against one big batch,
in float64, on gloo. The floor is bare ranks that do nothing else. Every row has a program in
``benchmarks/speed_programs``, which says what it does. A time is from the start of a check to the
start of the next; ``processors`` is what all processors together spent on it. Fast rows take turns
with the floor, ``--rounds`` times, and their ratio is the median over the rounds; slow rows make
``--slow-checks`` checks, once.
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
    ProgramFailed,
    end_with_sigterm,
    machine,
    run_program,
    whole_number,
)

EXAMPLES = 16
"""The examples of the big batch, which the ranks share equally."""

SECONDS_TO_START = 120.0
SECONDS_A_CHECK = 60.0
"""A program that takes longer hangs, which is a failure."""


@dataclass(frozen=True)
class Harness:
    """A way to run the checks.

    ``program``: its file in ``speed_programs``, without ``.py``. ``options``: of pytest. ``slow``:
    every check takes seconds. ``needs``: the packages that it needs beside torch and pytest.
    """

    name: str
    program: str
    options: tuple[str, ...] = ()
    slow: bool = False
    needs: tuple[str, ...] = ()

    @property
    def warm_up(self) -> int:
        """The number of first checks that do not count."""
        return 1 if self.slow else 5

    @property
    def file(self) -> str:
        """The name of its file in the folder where it runs; pytest finds tests by this name."""
        return f"{self.program}.py" if self is FLOOR else f"test_{self.program}.py"

    @property
    def files(self) -> dict[str, Path]:
        """The files in the folder where it runs."""
        programs = BENCHMARKS / "speed_programs"
        names = ("the_check.py", "record_times.py", "processor_time.py", "bare.py")
        shared = {name: programs / name for name in names}
        return shared | {self.file: programs / f"{self.program}.py"}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of Python."""
        if self is FLOOR:
            return (self.file,)
        plugins = ("-p", "record_times", "-p", "no:cacheprovider")
        return ("-m", "pytest", *plugins, *self.options, self.file)


SUITE = ("-p", "ddp_equivalence.pytest_plugin")
INTERNAL = ("expecttest",)  # torch's internal test classes import it

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
    """The measurements of a harness on a number of ranks, in seconds.

    ``checks``: the times of each round. ``cold``: from the start of each run to its first
    comparison. ``processor``: that a check took of all processors, in each round; none where every
    check has new processes. ``trouble``: why nothing was measured.
    """

    ranks: int
    harness: str
    checks: list[list[float]] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    trouble: str = ""

    @property
    def sorted_checks(self) -> list[float]:
        return sorted(seconds for of_round in self.checks for seconds in of_round)


def run(harness: Harness, ranks: int, total: int) -> Finished:
    """Run ``total`` checks in a harness. Raises ProgramFailed if not every check passed."""
    limit = SECONDS_TO_START + total * SECONDS_A_CHECK
    settings = {"RANKS": ranks, "CHECKS": total}
    finished = run_program(harness.files, harness.arguments, settings, limit)
    if finished.result["passed"] != total:
        raise ProgramFailed(f"{finished.result['passed']} of {total} checks passed")
    return finished


def total_for(harness: Harness, counted: int) -> int:
    """The checks that count, those that warm up, and one more, whose start ends the last time."""
    return harness.warm_up + counted + 1


def between_starts(harness: Harness, finished: Finished) -> list[float]:
    """The seconds of every check that counts."""
    starts = finished.result["starts"][harness.warm_up :]
    return [after - before for before, after in pairwise(starts)]


def measure(
    harnesses: tuple[Harness, ...], ranks: int, checks: int, slow_checks: int, rounds: int
) -> list[Row]:
    """All rows for a number of ranks. Fast harnesses take turns, so a busy minute slows all."""
    rows = {harness: Row(ranks, harness.name) for harness in harnesses}
    for harness in _turns(harnesses, rounds):
        row = rows[harness]
        missing = [name for name in harness.needs if find_spec(name) is None]
        if missing:
            row.trouble = f"NOT RUN: needs {', '.join(missing)} (the extra 'benchmarks')"
        if row.trouble:
            continue
        _print_progress(f"{ranks} ranks: {harness.name}")
        counted = slow_checks if harness.slow else checks
        try:
            finished = run(harness, ranks, total_for(harness, counted))
        except ProgramFailed as error:
            row.trouble = f"FAILED: {str(error).splitlines()[-1]}"
            _print_progress(str(error))
            continue
        row.checks.append(between_starts(harness, finished))
        row.cold.append(finished.result["first_comparison"] - finished.started)
        if not harness.slow:
            row.processor.append(finished.result["processor"])
    return list(rows.values())


def _turns(harnesses: tuple[Harness, ...], rounds: int) -> Iterator[Harness]:
    for _ in range(rounds):
        yield from (harness for harness in harnesses if not harness.slow)
    yield from (harness for harness in harnesses if harness.slow)


def _print_progress(text: str) -> None:
    """Print to stderr, so that stdout has the table only."""
    print(text, file=sys.stderr, flush=True)


HEAD = (
    "ranks  harness                       checks     median        90%  over floor  (by round)"
    "    processors  first comparison"
)


def table_lines(rows: list[Row]) -> Iterator[str]:
    """The lines of the table for one number of ranks."""
    floor = rows[0]
    for row in rows:
        start = f"{row.ranks:>5}  {row.harness:<26}"
        if row.trouble:
            yield f"{start}  {row.trouble}"
            continue
        checks = row.sorted_checks
        ratios = _over(row, floor)
        ratio = f"{median(ratios):.2f}" if ratios else ""
        processor = _time(median(row.processor)) if row.processor else ""
        by_round = f"({min(ratios):.2f}-{max(ratios):.2f})" if len(ratios) > 1 else ""
        yield (
            f"{start}{len(checks):>10}{_time(median(checks)):>11}{_time(_ninth_decile(checks)):>11}"
            f"{ratio:>12}  {by_round:<11}{processor:>13}{median(row.cold):>16.1f} s"
        )


def _over(row: Row, floor: Row) -> list[float]:
    """The row's medians over the floor's: one for each round if both have the same rounds."""
    if not floor.checks:
        return []
    if len(row.checks) != len(floor.checks):
        return [median(row.sorted_checks) / median(floor.sorted_checks)]
    pairs = zip(row.checks, floor.checks, strict=True)
    return [median(own) / median(bare) for own, bare in pairs]


def _ninth_decile(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, round(0.9 * len(ordered)))]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.2f} ms"


def main() -> int:
    """Print the table; return 1 if a harness failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=whole_number(1), nargs="+", default=[2, 4, 8])
    parser.add_argument(
        "--checks", type=whole_number(1), default=200, help="checks of a fast row in a round"
    )
    parser.add_argument(
        "--slow-checks",
        type=whole_number(0),
        default=5,
        help="checks of a slow row (0: no slow rows)",
    )
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
    harnesses = tuple(each for each in HARNESSES if arguments.slow_checks or not each.slow)
    all_rows = []
    for ranks in arguments.ranks:
        rows = measure(harnesses, ranks, arguments.checks, arguments.slow_checks, arguments.rounds)
        print("\n".join(table_lines(rows)), flush=True)
        all_rows += rows
    if arguments.json:
        results = {"machine": machine(), "rows": [vars(row) for row in all_rows]}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(row.trouble.startswith("FAILED") for row in all_rows))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
