"""Measure how the time of a run grows with its cases, and of a check with ranks and parameters.

    python benchmarks/curves.py [--repeats 3]     measure, write docs/cost.csv and docs/cost.svg
    python benchmarks/curves.py --curve parameters    measure one curve anew, and keep the others
    python benchmarks/curves.py --only-draw       draw docs/cost.csv again

Every point is measured with this suite on warm ranks, and with bare ranks that make the same check
(the floor of ``speed.py`` and of ``large_model.py``). The two take turns. A point is the median
over all checks of all repeats. Memory is the most that the machine used, above what it used before
the program began; the cache of files, which it gives back when it needs to, does not count.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import large_model
import psutil
import speed
from cost_plot import draw
from cost_table import FLOOR, SUITE, Point, read, write
from measured_process import CHECKOUT, ProgramFailed, end_with_sigterm, machine, whole_number

CASES = (1, 10, 50, 200, 500)
RANKS = (1, 2, 4, 8, 16)
PARAMETERS = {10**3: 50, 10**4: 50, 10**5: 20, 10**6: 10, 10**7: 3, 10**8: 1, 10**9: 1}
"""The parameters of the model -> the number of checks in each repeat."""

IN_TURN_FROM = 10**9
"""From so many parameters on, the floor computes the big batch before the ranks work, too, because
both together do not fit into 24 GiB.
"""

Measured = tuple[list[float], float]
"""The seconds of checks, and the megabytes that they took at most; 0 if these were not measured."""

SPEED_PROGRAMS = {SUITE: speed.WARM, FLOOR: speed.FLOOR}
LARGE_PROGRAMS = {SUITE: large_model.SUITE, FLOOR: large_model.BARE}


def whole_run(program: str, cases: int) -> Measured:
    """The seconds of a run of ``cases`` cases on two ranks, from its process's start to its end."""
    finished = speed.run(SPEED_PROGRAMS[program], ranks=2, total=cases)
    return [finished.ended - finished.started], 0.0


def check_on_ranks(program: str, ranks: int, checks: int) -> Measured:
    """The seconds of each check of the small model on ``ranks`` ranks."""
    harness = SPEED_PROGRAMS[program]
    finished = speed.run(harness, ranks, speed.total_for(harness, checks))
    return speed.between_starts(harness, finished), 0.0


def check_of_parameters(program: str, parameters: int) -> Measured:
    """The checks of a model of this size, on two ranks, in float32."""
    with most_used() as used:
        finished = large_model.run(
            LARGE_PROGRAMS[program],
            parameters,
            "float32",
            PARAMETERS[parameters],
            step="ddp",
            in_turn=parameters >= IN_TURN_FROM,
        )
    return finished.result["seconds"], (max(used) - used[0]) / 2**20


@contextmanager
def most_used() -> Iterator[list[int]]:
    """The memory that the machine uses, in bytes, again and again while the block runs."""
    used, ended = [int(psutil.virtual_memory().used)], threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            used.append(int(psutil.virtual_memory().used))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield used
    finally:
        ended.set()
        thread.join()


def measure(
    curve: str, places: Iterator[int], repeats: int, check: Callable[[str, int], Measured]
) -> Iterator[Point]:
    """The points of one curve, for both programs."""
    for at in places:
        times: dict[str, list[float]] = {SUITE: [], FLOOR: []}
        memory: dict[str, list[float]] = {SUITE: [], FLOOR: []}
        for turn in range(repeats):
            for program in times:
                progress = f"{at:,} {curve}, {turn + 1} of {repeats}: {program}"
                print(progress, file=sys.stderr, flush=True)
                seconds, megabytes = check(program, at)
                times[program] += seconds
                memory[program].append(megabytes)
        for program, taken in times.items():
            most = median(memory[program])
            yield Point(curve, at, program, median(taken), min(taken), max(taken), len(taken), most)


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
    parser.add_argument("--curve", choices=("cases", "ranks", "parameters"))
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
    if (arguments.only_draw or arguments.curve) and not data.is_file():
        parser.error(f"--only-draw and --curve: there is no {data}")
    if not arguments.only_draw:
        if not arguments.folder.is_dir():
            parser.error(f"--folder {arguments.folder}: there is no such folder")
        end_with_sigterm()
        print(machine(), flush=True)
        try:
            kept = read(data) if arguments.curve else []
            kept = [one for one in kept if one.curve != arguments.curve]
            write([*kept, *_measure_all(arguments)], data)
        except ProgramFailed as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    points = read(data)
    for point in points:
        memory = f"{point.megabytes:>9,.0f} MiB" if point.megabytes else ""
        print(
            f"{point.at:>13,} {point.curve:<11} {point.program:<11}{point.seconds:>11.4f} s{memory}"
        )
    draw(points, plot)
    return 0


def _measure_all(arguments: argparse.Namespace) -> list[Point]:
    def up_to(most: int, places: Any) -> Iterator[int]:
        return (at for at in places if at <= most)

    def on_ranks(program: str, ranks: int) -> Measured:
        return check_on_ranks(program, ranks, arguments.checks)

    curves = (
        ("cases", up_to(arguments.most_cases, CASES), whole_run),
        ("ranks", up_to(arguments.most_ranks, RANKS), on_ranks),
        ("parameters", up_to(arguments.most_parameters, PARAMETERS), check_of_parameters),
    )
    return [
        point
        for curve, places, check in curves
        if arguments.curve in (None, curve)
        for point in measure(curve, places, arguments.repeats, check)
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
