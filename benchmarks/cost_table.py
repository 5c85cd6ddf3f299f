"""The points of the cost curves as a table on disk."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

SUITE, FLOOR = "this suite", "bare ranks"
"""The two worlds of every curve."""


@dataclass(frozen=True)
class Point:
    """One point of a curve: ``seconds`` is the median of so many ``timed``."""

    curve: str
    at: int
    world: str
    seconds: float
    lowest: float
    highest: float
    timed: int


def write(points: Iterable[Point], path: Path) -> None:
    """One line a point."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Point)])
        for point in points:
            cells = [f"{c:.5f}" if isinstance(c, float) else str(c) for c in astuple(point)]
            writer.writerow(cells)


def read(path: Path) -> list[Point]:
    """What ``write`` wrote."""
    with path.open(newline="") as file:
        return [
            Point(
                curve=row["curve"],
                at=int(row["at"]),
                world=row["world"],
                seconds=float(row["seconds"]),
                lowest=float(row["lowest"]),
                highest=float(row["highest"]),
                timed=int(row["timed"]),
            )
            for row in csv.DictReader(file)
        ]
