"""Draw two plots of the sandbox: the weight over an epoch, and the variance over the batch size.

    python benchmarks/sandbox_plots.py docs

This writes ``weight.svg`` and ``variance.svg``, with 1,000 experiments behind each dot.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_equivalence.commands.sandbox.training import SAMPLES, Problem, closed_form, train

EXPERIMENTS = 1000
"""The number of experiments behind each dot. The 99.9 % interval is smaller than the dot, except at
the largest batches."""

RANKS = 8

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#b0b0b0"
"""Colours that people with any colour vision can tell apart.

Source: Okabe, Ito, Color universal design, 2008.
"""

CURVES = (
    ("lr 0.001, batch 128", BLUE, 1e-3, [(128, 1), (16, RANKS)]),
    ("lr 0.0028284, batch 128", GREEN, 2.8284e-3, [(16, RANKS)]),
    ("lr 0.001, batch 16", GREY, 1e-3, [(16, 1)]),  # another curve lies on it
    ("lr 0.008, batch 128", ORANGE, 8e-3, [(16, RANKS)]),
)
"""Label, colour and learning rate of the published rows, and the batch sizes and ranks of those in
which the weight moves the same way."""

SCALINGS: tuple[tuple[str, str, Callable[[int], float]], ...] = (
    ("linear: lr 0.001 × batch / 16", ORANGE, lambda batch: 1e-3 * batch / 16),
    ("square root: lr 0.001 × √(batch / 16)", GREEN, lambda batch: 1e-3 * math.sqrt(batch / 16)),
    ("fixed lr 0.001", BLUE, lambda batch: 1e-3),
)
"""How the learning rate follows from the effective batch size; at batch 16 all give 0.001."""


def draw(folder: Path, seed: int = 0) -> tuple[Path, ...]:
    """Train what the plots show and write ``weight.svg`` and ``variance.svg``; returns their paths.

    Raises OSError if the folder cannot be made, RankFailed if a rank fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    import_module("matplotlib").use("agg")
    pyplot = import_module("matplotlib.pyplot")
    paths = folder / "weight.svg", folder / "variance.svg"
    with pyplot.rc_context({"font.size": 10, "axes.titlesize": 11, "svg.hashsalt": "sandbox"}):
        for path, make in zip(paths, (_weight, _variance), strict=True):
            figure = make(pyplot, seed)
            figure.savefig(path, metadata={"Date": None})  # the same data gives the same file
            pyplot.close(figure)
    return paths


def _weight(pyplot: Any, seed: int) -> Any:
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axes, noise in zip(panels, (False, True), strict=True):
        for label, colour, lr, runs in CURVES:
            if colour == GREEN and not noise:
                continue  # no published row runs this curve without noise
            problems = [_problem(lr, batch, ranks, noise, seed) for batch, ranks in runs]
            seen = range(0, SAMPLES + 1, problems[0].effective_batch)
            width = 5.0 if colour == GREY else 1.5
            path = closed_form(problems[0]).path
            axes.plot(seen, path, color=colour, linewidth=width, label=label)
            for problem in problems:
                axes.plot(seen, train(problem).path, **_marker(problem.ranks, colour))
        axes.set(xlabel="samples seen in the epoch", xticks=range(0, SAMPLES + 1, 64))
        axes.set_xlim(-8, SAMPLES + 8)
    panels[0].set(ylabel="weight w (no unit)", title="Without noise")
    panels[1].set(title=f"With noise, mean of {EXPERIMENTS:,} experiments")
    _finish(panels[0])
    _finish(panels[1], loc="lower left")
    return figure


def _variance(pyplot: Any, seed: int) -> Any:
    figure, axes = pyplot.subplots(figsize=(7.6, 5), layout="constrained")
    sizes = [2**power for power in range(9)]
    for label, colour, lr in SCALINGS:
        for ranks in (1, RANKS):
            reached = [size for size in sizes if size >= ranks]
            problems = [_problem(lr(size), size // ranks, ranks, True, seed) for size in reached]
            if ranks == 1:
                expected = [closed_form(problem).variance for problem in problems]
                axes.plot(sizes, expected, color=colour, linewidth=1.5, label=label)
            found = [train(problem).variance for problem in problems]
            axes.plot(reached, found, **_marker(ranks, colour))
    axes.set(xscale="log", yscale="log", title="Variance of all update steps of an epoch")
    axes.set(xlabel="effective batch size (samples per update, all ranks)")
    axes.set(ylabel="variance of the update steps (units of w²)")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    _finish(axes)
    return figure


def _problem(lr: float, batch: int, ranks: int, noise: bool, seed: int) -> Problem:
    experiments = EXPERIMENTS if noise else 1
    fields = {"deterministic": not noise, "n_experiments": experiments, "seed": seed}
    return Problem(lr=lr, batch_size=batch, ranks=ranks, **fields)  # type: ignore[arg-type]


def _marker(ranks: int, colour: str) -> dict[str, Any]:
    """A dot for one process, a ring around it for ranks."""
    style = {"linestyle": "", "marker": "o"}
    if ranks == 1:
        return style | {"markersize": 4, "color": colour if colour != GREY else "#333333"}
    return style | {"markersize": 9, "color": colour, "markerfacecolor": "none"}


def _finish(axes: Any, **legend: Any) -> None:
    """The grid, and a legend that says what lines, dots and rings are."""
    for ranks, label in ((1, "single process"), (RANKS, f"multi: {RANKS} ranks")):
        axes.plot([], [], label=label, **_marker(ranks, "#333333"))
    axes.legend(frameon=False, title="line: closed form", **legend)
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
