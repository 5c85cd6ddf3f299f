"""How the cost grows: a run with its cases, a check with its ranks and with its parameters.

    python benchmarks/curves.py [--repeats 3]     measures, writes docs/cost.csv and docs/cost.svg
    python benchmarks/curves.py --only-draw       draws docs/cost.csv again

Every point is this suite on warm ranks, or bare ranks that make the same check (the floor of
``speed.py`` and of ``large_model.py``). The two take turns; medians over all checks of all repeats.
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
from measured_process import CHECKOUT, WorldFailed, end_with_sigterm, machine, whole_number

CASES = (1, 10, 50, 200, 500)
RANKS = (1, 2, 4, 8, 16)
PARAMETERS = {10**3: 50, 10**4: 50, 10**5: 20, 10**6: 10, 10**7: 3, 10**8: 1}
"""Parameters of the model -> checks in each repeat."""

OF_SPEED = {SUITE: speed.WARM, FLOOR: speed.FLOOR}
OF_LARGE = {SUITE: large_model.SUITE, FLOOR: large_model.BARE}


def whole_run(world: str, cases: int) -> list[float]:
    """A run of so many cases on two ranks, from the start of its process to its end."""
    finished = speed.run(OF_SPEED[world], ranks=2, total=cases)
    return [finished.ended - finished.started]


def check_on_ranks(world: str, ranks: int, checks: int) -> list[float]:
    """Each check on so many ranks, of the small model."""
    harness = OF_SPEED[world]
    finished = speed.run(harness, ranks, speed.total_for(harness, checks))
    return speed.between_starts(harness, finished)


def check_of_parameters(world: str, parameters: int) -> list[float]:
    """Each check of a model with so many parameters, on two ranks, in float64."""
    checks = PARAMETERS[parameters]
    return large_model.run(OF_LARGE[world], parameters, "float64", checks).result["seconds"]


def measure(
    curve: str, places: Iterator[int], repeats: int, seconds: Callable[[str, int], list[float]]
) -> Iterator[Point]:
    """The points of one curve, in both worlds."""
    for at in places:
        found: dict[str, list[float]] = {SUITE: [], FLOOR: []}
        for turn in range(repeats):
            for world, every in found.items():
                print(
                    f"{at:,} {curve}, {turn + 1} of {repeats}: {world}", file=sys.stderr, flush=True
                )
                every += seconds(world, at)
        for world, every in found.items():
            yield Point(curve, at, world, median(every), min(every), max(every), len(every))


def main() -> int:
    """Measure, write and draw; 1 if a world failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=whole_number(1), default=3)
    parser.add_argument("--checks", type=whole_number(1), default=50, help="on ranks, a repeat")
    parser.add_argument("--most-cases", type=whole_number(1), default=max(CASES))
    parser.add_argument("--most-ranks", type=whole_number(1), default=max(RANKS))
    parser.add_argument("--most-parameters", type=whole_number(1000), default=max(PARAMETERS))
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "docs", help="where they go")
    parser.add_argument("--only-draw", action="store_true", help="draw what was written before")
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
        except WorldFailed as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
    points = read(data)
    for point in points:
        print(f"{point.at:>11,} {point.curve:<11} {point.world:<11}{point.seconds:>11.4f} s")
    draw(points, plot)
    return 0


def _measure_all(arguments: argparse.Namespace) -> list[Point]:
    def up_to(most: int, places: Any) -> Iterator[int]:
        return (at for at in places if at <= most)

    def on_ranks(world: str, ranks: int) -> list[float]:
        return check_on_ranks(world, ranks, arguments.checks)

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
