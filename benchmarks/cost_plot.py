"""Draw the cost curves in four panels, each curve with its name beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_table import FLOOR, SUITE, Point

COLOURS = {SUITE: "#1b6ca8", FLOOR: "#767676"}


@dataclass(frozen=True)
class Panel:
    """The panel of one curve: its seconds, in units of which one has ``scale``; or its gigabytes of
    memory.
    """

    curve: str
    title: str
    below: str
    unit: str
    scale: float = 1.0
    logarithmic: bool = True
    of_memory: bool = False

    def value(self, point: Point) -> float:
        """What the panel shows of a point."""
        return point.megabytes / 1024 if self.of_memory else self.scale * point.seconds


PANELS = (
    Panel("cases", "A run of more cases", "cases, on 2 ranks", "seconds a run", logarithmic=False),
    Panel("ranks", "A check on more ranks", "ranks", "milliseconds a check", scale=1000.0),
    Panel("parameters", "A check of a larger model", "parameters, on 2 ranks", "seconds a check"),
    Panel("parameters", "Its memory", "parameters, on 2 ranks", "GiB", of_memory=True),
)

LEAST_GIGABYTES = 0.02
"""Less is not drawn: it is lost in what a process takes anyway."""


def draw(points: Sequence[Point], path: Path) -> None:
    """Write the plot, in the format that the path ends with."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("agg")
    # With a fixed salt the same data gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "cost", "font.size": 9, "axes.titlesize": 10})
    figure, all_axes = pyplot.subplots(1, 4, figsize=(13.5, 3.3), layout="constrained")
    for axes, panel in zip(all_axes, PANELS, strict=True):
        least = LEAST_GIGABYTES if panel.of_memory else 0.0
        small = {point.at for point in points if panel.value(point) < least}
        shown = [one for one in points if one.curve == panel.curve and one.at not in small]
        _draw_panel(axes, panel, shown)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    pyplot.close(figure)


def _draw_panel(axes: Any, panel: Panel, points: Sequence[Point]) -> None:
    places = sorted({point.at for point in points})
    curves = {
        program: [
            panel.value(point)
            for point in sorted(points, key=lambda point: point.at)
            if point.program == program
        ]
        for program in COLOURS
    }
    scale = "log" if panel.logarithmic else "linear"
    axes.set(xscale=scale, yscale=scale, xlabel=panel.below, ylabel=panel.unit)
    axes.set_title(panel.title, loc="left")
    for program, values in curves.items():
        colour = COLOURS[program]
        axes.plot(places, values, color=colour, marker="o", markersize=4, linewidth=1.6)
    _set_ticks(axes, panel, places)
    for program, other in ((SUITE, FLOOR), (FLOOR, SUITE)):
        _label(axes, panel, places, program, curves[program], curves[other])
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _set_ticks(axes: Any, panel: Panel, places: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    # On a linear axis the labels of small places would overlap.
    shown = [at for at in places if panel.logarithmic or at == places[0] or 10 * at > places[-1]]
    powers = panel.curve == "parameters"
    labels = [f"$10^{{{len(str(at)) - 1}}}$" if powers else str(at) for at in shown]
    axes.set_xticks(shown, labels)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.2)
    if panel.logarithmic:
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label(
    axes: Any,
    panel: Panel,
    places: Sequence[int],
    program: str,
    own: Sequence[float],
    other: Sequence[float],
) -> None:
    """Write the curve's name near its middle, and its values at both ends."""
    colour = COLOURS[program]
    for place in {0, len(places) - 1}:
        above = own[place] > other[place]
        axes.annotate(
            _figure(own[place]),
            (places[place], own[place]),
            xytext=(0, 6 if above else -13),
            textcoords="offset points",
            ha="center",
            color=colour,
            fontsize=8,
        )
    place = len(places) // 2 if panel.logarithmic else max(0, len(places) - 2)
    above = own[place] > other[place]
    axes.annotate(
        program,
        (places[place], own[place]),
        xytext=(-5 if above else 5, 5 if above else -14),
        textcoords="offset points",
        ha="right" if above else "left",
        color=colour,
        fontweight="bold",
    )


def _figure(value: float) -> str:
    """Two digits, or all digits of a larger whole number."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
