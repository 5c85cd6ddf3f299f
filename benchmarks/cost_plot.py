"""Draws the cost curves: three small panels, each curve named where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_table import FLOOR, SUITE, Point

COLOURS = {SUITE: "#1b6ca8", FLOOR: "#767676"}


@dataclass(frozen=True)
class Panel:
    """One curve's panel. ``scale``: how many of its unit a second is."""

    curve: str
    title: str
    below: str
    unit: str
    scale: float = 1.0
    logarithmic: bool = True


PANELS = (
    Panel("cases", "A run of more cases", "cases, on 2 ranks", "seconds a run", logarithmic=False),
    Panel("ranks", "A check on more ranks", "ranks", "milliseconds a check", scale=1000.0),
    Panel("parameters", "A check of a larger model", "parameters, on 2 ranks", "seconds a check"),
)


def draw(points: Sequence[Point], path: Path) -> None:
    """Write the plot; its format is the path's ending."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.use("agg")
    # The same data gives the same file.
    mpl.rcParams.update({"svg.hashsalt": "cost", "font.size": 9, "axes.titlesize": 10})
    figure, every = pyplot.subplots(1, 3, figsize=(10.5, 3.3), layout="constrained")
    for axes, panel in zip(every, PANELS, strict=True):
        _draw_panel(axes, panel, [point for point in points if point.curve == panel.curve])
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    pyplot.close(figure)


def _draw_panel(axes: Any, panel: Panel, points: Sequence[Point]) -> None:
    places = sorted({point.at for point in points})
    curves = {
        world: [
            panel.scale * point.seconds
            for point in sorted(points, key=lambda point: point.at)
            if point.world == world
        ]
        for world in COLOURS
    }
    scale = "log" if panel.logarithmic else "linear"
    axes.set(xscale=scale, yscale=scale, xlabel=panel.below, ylabel=panel.unit)
    axes.set_title(panel.title, loc="left")
    for world, values in curves.items():
        colour = COLOURS[world]
        axes.plot(places, values, color=colour, marker="o", markersize=4, linewidth=1.6)
    _set_ticks(axes, panel, places)
    for world, other in ((SUITE, FLOOR), (FLOOR, SUITE)):
        _label(axes, panel, places, world, curves[world], curves[other])
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _set_ticks(axes: Any, panel: Panel, places: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    # On a linear axis the small places lie on each other.
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
    world: str,
    own: Sequence[float],
    other: Sequence[float],
) -> None:
    """The curve's name on its way, and its figures at both ends."""
    colour = COLOURS[world]
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
        world,
        (places[place], own[place]),
        xytext=(-5 if above else 5, 5 if above else -14),
        textcoords="offset points",
        ha="right" if above else "left",
        color=colour,
        fontweight="bold",
    )


def _figure(value: float) -> str:
    """Two digits, or the whole number where it has more."""
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
