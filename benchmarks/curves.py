"""Measure how the time of a run grows with its cases, and of a check with ranks and parameters.

    python benchmarks/curves.py [--repeats 3]     measure, write docs/cost.csv and docs/cost.svg
    python benchmarks/curves.py --only-draw       draw docs/cost.csv again

Every point is measured with this suite on warm ranks, and with bare ranks that make the same check
(the floor of ``speed.py`` and of ``large_model.py``). The two take turns. A point is the median
over all checks of all repeats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import large_model
import speed
from cost_plot import draw
from cost_table import FLOOR, SUITE, Point, read, write
from measured_process import CHECKOUT, ProgramFailed, end_with_sigterm, machine, whole_number

CASES = (1, 10, 50, 200, 500)
RANKS = (1, 2, 4, 8, 16)
PARAMETERS = {10**3: 50, 10**4: 50, 10**5: 20, 10**6: 10, 10**7: 3, 10**8: 1}
"""The parameters of the model -> the number of checks in each repeat."""

SPEED_PROGRAMS = {SUITE: speed.WARM, FLOOR: speed.FLOOR}
LARGE_PROGRAMS = {SUITE: large_model.SUITE, FLOOR: large_model.BARE}


def whole_run(program: str, cases: int) -> list[float]:
    """The seconds of a run of ``cases`` cases on two ranks, from its process's start to its end."""
    finished = speed.run(SPEED_PROGRAMS[program], ranks=2, total=cases)
    return [finished.ended - finished.started]


def check_on_ranks(program: str, ranks: int, checks: int) -> list[float]:
    """The seconds of each check of the small model on ``ranks`` ranks."""
    harness = SPEED_PROGRAMS[program]
    finished = speed.run(harness, ranks, speed.total_for(harness, checks))
    return speed.between_starts(harness, finished)


def check_of_parameters(program: str, parameters: int) -> list[float]:
    """The seconds of each check of a model of this size, on two ranks, in float64."""
    checks = PARAMETERS[parameters]
    return large_model.run(LARGE_PROGRAMS[program], parameters, "float64", checks).result["seconds"]


def measure(
    curve: str, places: Iterator[int], repeats: int, seconds: Callable[[str, int], list[float]]
) -> Iterator[Point]:
    """The points of one curve, for both programs."""
    for at in places:
        times: dict[str, list[float]] = {SUITE: [], FLOOR: []}
        for turn in range(repeats):
            for program in times:
                progress = f"{at:,} {curve}, {turn + 1} of {repeats}: {program}"
                print(progress, file=sys.stderr, flush=True)
                times[program] += seconds(program, at)
        for program, taken in times.items():
            yield Point(curve, at, program, median(taken), min(taken), max(taken), len(taken))


def main() -> int:
    """Measure, write and draw; return 1 if a program failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    parser.add_argument(
        "--checks",
        type=whole_number(1),
        default=50,
        help="checks on each number of ranks in a repeat",
    )
    parser.add_argument("--most-cases", type=whole_number(1), default=max(CASES))
    parser.add_argument("--most-ranks", type=whole_number(1), default=max(RANKS))
    parser.add_argument("--most-parameters", type=whole_number(1000), default=max(PARAMETERS))
    parser.add_argument(
        "--folder", type=Path, default=CHECKOUT / "docs", help="the folder to write to"
    )
    parser.add_argument(
        "--only-draw", action="store_true", help="draw the table that was written before"
    )
    arguments = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.error("needs matplotlib: pip install '.[plots]'")
    data, plot = arguments.folder / "cost.csv", arguments.folder / "cost.svg"
    if arguments.only_draw and not data.is_file():
        parser.error(f"--only-draw: there is no {data}")
    if not arguments.only_draw:
        if not arguments.folder.is_dir():
            parser.error(f"--folder {arguments.folder}: there is no such folder")
        end_with_sigterm()
        print(machine(), flush=True)
        try:
            write(_measure_all(arguments), data)
        except ProgramFailed as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    points = read(data)
    for point in points:
        print(f"{point.at:>11,} {point.curve:<11} {point.program:<11}{point.seconds:>11.4f} s")
    draw(points, plot)
    return 0


def _measure_all(arguments: argparse.Namespace) -> list[Point]:
    def up_to(most: int, places: Any) -> Iterator[int]:
        return (at for at in places if at <= most)

    def on_ranks(program: str, ranks: int) -> list[float]:
        return check_on_ranks(program, ranks, arguments.checks)

    curves = (
        ("cases", up_to(arguments.most_cases, CASES), whole_run),
        ("ranks", up_to(arguments.most_ranks, RANKS), on_ranks),
        ("parameters", up_to(arguments.most_parameters, PARAMETERS), check_of_parameters),
    )
    return [
        point
        for curve, places, seconds in curves
        for point in measure(curve, places, arguments.repeats, seconds)
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
