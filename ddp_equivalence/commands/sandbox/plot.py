"""Two plots: the weight over an epoch, and the variance of the steps over the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.commands.sandbox.closed_form import closed_form
from ddp_equivalence.commands.sandbox.problem import SAMPLES, Setup
from ddp_equivalence.commands.sandbox.published import RANKS
from ddp_equivalence.commands.sandbox.training import train

EXPERIMENTS = 1000
"""For each dot; its 99.9 % interval is smaller than the dot, but for the largest batches."""

BASE_LR, BASE_BATCH = 1e-3, 16
"""Where the three ways to scale the learning rate meet."""

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#b0b0b0"
"""Told apart with any colour vision. Source: Okabe, Ito, Color universal design, 2008."""


@dataclass(frozen=True)
class Curve:
    """The weight over one epoch in some of the rows; a second setup lies on the same line."""

    label: str
    colour: str
    lr: float
    single: int | None
    multi: bool
    width: float = 1.5


CURVES = (
    Curve("lr 0.001, batch 128", BLUE, 1e-3, 128, True),
    Curve("lr 0.0028284, batch 128", GREEN, 2.8284e-3, None, True),
    Curve("lr 0.001, batch 16", GREY, 1e-3, 16, False, width=5.0),  # another lies on it
    Curve("lr 0.008, batch 128", ORANGE, 8e-3, None, True),
)
"""The setups of the nine rows, those with the same line together."""


@dataclass(frozen=True)
class Scaling:
    """How the learning rate goes with the effective batch size."""

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


def look_for_matplotlib() -> None:
    """Raises BadCase where it is not installed."""
    if find_spec("matplotlib") is None:
        right = "an installed matplotlib: pip install 'ddp_equivalence[plots]'"
        raise BadCase("plot", "no matplotlib", right)


def draw(folder: Path, seed: int = 0) -> tuple[Path, ...]:
    """Run what is shown and write ``weight.svg`` and ``variance.svg``; their paths.

    Raises BadCase without matplotlib or where the folder cannot be made, RankFailed.
    """
    look_for_matplotlib()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadCase("plot", str(folder), f"a folder to write to; {error.strerror}") from error
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
            # No published row runs this one without noise.
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
    setups = []
    if curve.single is not None:
        setups.append(_setup(curve.lr, curve.single, 1, deterministic, seed))
    if curve.multi:
        setups.append(_setup(curve.lr, 16, RANKS, deterministic, seed))
    for number, setup in enumerate(setups):
        seen = range(0, SAMPLES + 1, setup.effective_batch)
        if number == 0:
            expected = closed_form(setup).path
            axes.plot(seen, expected, color=curve.colour, linewidth=curve.width, label=curve.label)
        axes.plot(seen, train(setup).path, linestyle="", **_marker(setup, curve.colour))


def _variance(pyplot: Any, seed: int) -> Any:
    figure, axes = pyplot.subplots(figsize=(7.6, 5), layout="constrained")
    sizes = [2**power for power in range(9)]
    for scaling in SCALINGS:
        of_ranks: dict[int, list[float]] = {1: [], RANKS: []}
        expected = []
        for size in sizes:
            setup = _setup(scaling.lr(size), size, 1, False, seed)
            expected.append(closed_form(setup).variance)
            of_ranks[1].append(train(setup).variance)
        reached = [size for size in sizes if size >= RANKS]
        for size in reached:
            setup = _setup(scaling.lr(size), size // RANKS, RANKS, False, seed)
            of_ranks[RANKS].append(train(setup).variance)
        axes.plot(sizes, expected, color=scaling.colour, linewidth=1.5, label=scaling.label)
        for ranks, places in ((1, sizes), (RANKS, reached)):
            style = _marker(_setup(BASE_LR, 1, ranks, False, seed), scaling.colour)
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


def _setup(lr: float, batch: int, ranks: int, deterministic: bool, seed: int) -> Setup:
    return Setup(
        lr=lr,
        batch_size=batch,
        ranks=ranks,
        deterministic=deterministic,
        n_experiments=1 if deterministic else EXPERIMENTS,
        seed=seed,
    )


def _marker(setup: Setup, colour: str) -> dict[str, Any]:
    """A dot for one process, a ring around it for ranks."""
    if setup.ranks == 1:
        return {"marker": "o", "markersize": 4, "color": colour if colour != GREY else "#333333"}
    return {"marker": "o", "markersize": 9, "color": colour, "markerfacecolor": "none"}


def _handles(pyplot: Any) -> tuple[Any, ...]:
    setups = _setup(BASE_LR, 1, 1, True, 0), _setup(BASE_LR, 1, RANKS, True, 0)
    return tuple(
        pyplot.Line2D([], [], linestyle="", **_marker(setup, "#333333")) for setup in setups
    )


def _tidy(axes: Any) -> None:
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
