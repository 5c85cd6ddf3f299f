"""Read and write the points of the cost curves as a table."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from pathlib import Path

SUITE, FLOOR = "this suite", "bare ranks"
"""The two programs of every curve."""


@dataclass(frozen=True)
class Point:
    """One point of a curve: ``seconds`` is the median of ``timed`` measurements. ``megabytes``: the
    most memory that the machine used, above what it used before; 0 if it was not measured.
    """

    curve: str
    at: int
    program: str
    seconds: float
    lowest: float
    highest: float
    timed: int
    megabytes: float = 0.0


def write(points: Iterable[Point], path: Path) -> None:
    """Write a line for every point."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(Point)])
        for point in points:
            cells = [f"{c:.5f}" if isinstance(c, float) else str(c) for c in astuple(point)]
            writer.writerow(cells)


def read(path: Path) -> list[Point]:
    """Read the points that ``write`` has written."""
    with path.open(newline="") as file:
        return [
            Point(
                curve=row["curve"],
                at=int(row["at"]),
                program=row["program"],
                seconds=float(row["seconds"]),
                lowest=float(row["lowest"]),
                highest=float(row["highest"]),
                timed=int(row["timed"]),
                megabytes=float(row.get("megabytes") or 0),
            )
            for row in csv.DictReader(file)
        ]
