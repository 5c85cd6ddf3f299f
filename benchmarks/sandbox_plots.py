"""Draw two plots of the sandbox: the weight over an epoch, and the variance over the batch size.

    python benchmarks/sandbox_plots.py docs

This writes ``weight.svg`` and ``variance.svg``, with 1,000 experiments behind each dot.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_equivalence.commands.sandbox.table import RANKS
from ddp_equivalence.commands.sandbox.training import SAMPLES, Problem, closed_form, train

EXPERIMENTS = 1000
"""The number of experiments behind each dot. The 99.9 % interval is smaller than the dot, except at
the largest batches."""

BASE_LR, BASE_BATCH = 1e-3, 16
"""At this batch size the three ways to scale the learning rate all give this learning rate."""

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#b0b0b0"
"""Colours that people with any colour vision can tell apart.

Source: Okabe, Ito, Color universal design, 2008.
"""


@dataclass(frozen=True)
class Curve:
    """The weight over one epoch, for one or more published rows in which it moves the same way.

    ``single``: the batch size of the row on one process; None if there is no such row. ``multi``:
    whether there is a row on ranks with 16 examples each.
    """

    label: str
    colour: str
    lr: float
    single: int | None
    multi: bool
    width: float = 1.5


CURVES = (
    Curve("lr 0.001, batch 128", BLUE, 1e-3, 128, True),
    Curve("lr 0.0028284, batch 128", GREEN, 2.8284e-3, None, True),
    Curve("lr 0.001, batch 16", GREY, 1e-3, 16, False, width=5.0),  # another curve lies on it
    Curve("lr 0.008, batch 128", ORANGE, 8e-3, None, True),
)
"""The curves of the nine published rows."""


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows from the effective batch size."""

    label: str
    colour: str
    lr: Callable[[int], float]


def _square_root(batch: int) -> float:
    return BASE_LR * math.sqrt(batch / BASE_BATCH)


SCALINGS = (
    Scaling("linear: lr 0.001 × batch / 16", ORANGE, lambda batch: BASE_LR * batch / BASE_BATCH),
    Scaling("square root: lr 0.001 × √(batch / 16)", GREEN, _square_root),
    Scaling("fixed lr 0.001", BLUE, lambda batch: BASE_LR),
)


def draw(folder: Path, seed: int = 0) -> tuple[Path, ...]:
    """Train what the plots show and write ``weight.svg`` and ``variance.svg``; returns their paths.

    Raises OSError if the folder cannot be made, RankFailed if a rank fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    import_module("matplotlib").use("agg")
    pyplot = import_module("matplotlib.pyplot")
    style = {"font.size": 10, "axes.titlesize": 11, "svg.hashsalt": "sandbox"}
    paths = folder / "weight.svg", folder / "variance.svg"
    with pyplot.rc_context(style):
        for path, make in zip(paths, (_weight, _variance), strict=True):
            figure = make(pyplot, seed)
            figure.savefig(path, metadata={"Date": None})  # the same data gives the same file
            pyplot.close(figure)
    return paths


def _weight(pyplot: Any, seed: int) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axes, deterministic in zip(panels, (True, False), strict=True):
        for curve in CURVES:
            # No published row runs this curve without noise.
            if not (deterministic and curve.colour == GREEN):
                _draw_curve(axes, curve, deterministic, seed)
        _tidy(axes)
        axes.set(xlabel="samples seen in the epoch", xticks=range(0, SAMPLES + 1, 64))
        axes.set_xlim(-8, SAMPLES + 8)
    panels[0].set(ylabel="weight w (no unit)", title="Without noise")
    panels[1].set(title=f"With noise, mean of {EXPERIMENTS:,} experiments")
    dot, ring = _handles(pyplot)
    handles, labels = panels[1].get_legend_handles_labels()
    panels[0].legend([dot, ring], ["single process", f"multi: {RANKS} ranks"], frameon=False)
    panels[1].legend(handles, labels, frameon=False, title="line: closed form", loc="lower left")
    return figure


def _draw_curve(axes: Any, curve: Curve, deterministic: bool, seed: int) -> None:
    problems = []
    if curve.single is not None:
        problems.append(_problem(curve.lr, curve.single, 1, deterministic, seed))
    if curve.multi:
        problems.append(_problem(curve.lr, 16, RANKS, deterministic, seed))
    for number, problem in enumerate(problems):
        seen = range(0, SAMPLES + 1, problem.effective_batch)
        if number == 0:
            expected = closed_form(problem).path
            axes.plot(seen, expected, color=curve.colour, linewidth=curve.width, label=curve.label)
        axes.plot(seen, train(problem).path, linestyle="", **_marker(problem, curve.colour))


def _variance(pyplot: Any, seed: int) -> Any:
    figure, axes = pyplot.subplots(figsize=(7.6, 5), layout="constrained")
    sizes = [2**power for power in range(9)]
    for scaling in SCALINGS:
        of_ranks: dict[int, list[float]] = {1: [], RANKS: []}
        expected = []
        for size in sizes:
            problem = _problem(scaling.lr(size), size, 1, False, seed)
            expected.append(closed_form(problem).variance)
            of_ranks[1].append(train(problem).variance)
        reached = [size for size in sizes if size >= RANKS]
        for size in reached:
            problem = _problem(scaling.lr(size), size // RANKS, RANKS, False, seed)
            of_ranks[RANKS].append(train(problem).variance)
        axes.plot(sizes, expected, color=scaling.colour, linewidth=1.5, label=scaling.label)
        for ranks, places in ((1, sizes), (RANKS, reached)):
            style = _marker(_problem(BASE_LR, 1, ranks, False, seed), scaling.colour)
            axes.plot(places, of_ranks[ranks], linestyle="", **style)
    _tidy(axes)
    axes.set(xscale="log", yscale="log", title="Variance of all update steps of an epoch")
    axes.set(xlabel="effective batch size (samples per update, all ranks)")
    axes.set(ylabel="variance of the update steps (units of w²)")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    dot, ring = _handles(pyplot)
    handles, labels = axes.get_legend_handles_labels()
    labels = [*labels, "single process", f"multi: {RANKS} ranks"]
    axes.legend([*handles, dot, ring], labels, frameon=False, title="line: closed form")
    return figure


def _problem(lr: float, batch: int, ranks: int, deterministic: bool, seed: int) -> Problem:
    return Problem(
        lr=lr,
        batch_size=batch,
        ranks=ranks,
        deterministic=deterministic,
        n_experiments=1 if deterministic else EXPERIMENTS,
        seed=seed,
    )


def _marker(problem: Problem, colour: str) -> dict[str, Any]:
    """A dot for one process, a ring around it for ranks."""
    if problem.ranks == 1:
        return {"marker": "o", "markersize": 4, "color": colour if colour != GREY else "#333333"}
    return {"marker": "o", "markersize": 9, "color": colour, "markerfacecolor": "none"}


def _handles(pyplot: Any) -> tuple[Any, ...]:
    problems = _problem(BASE_LR, 1, 1, True, 0), _problem(BASE_LR, 1, RANKS, True, 0)
    return tuple(
        pyplot.Line2D([], [], linestyle="", **_marker(problem, "#333333")) for problem in problems
    )


def _tidy(axes: Any) -> None:
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw both plots."""
    parser = argparse.ArgumentParser(description="Draw two plots of the sandbox.")
    parser.add_argument("folder", type=Path, help="where to write weight.svg and variance.svg")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the noise; default 0")
    arguments = parser.parse_args()
    if find_spec("matplotlib") is None:
        parser.error("needs matplotlib: pip install '.[plots]'")
    for path in draw(arguments.folder, arguments.seed):
        print(path)


if __name__ == "__main__":
    main()
