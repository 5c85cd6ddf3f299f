"""The cost of what this machine cannot run: simulated worlds, and checks of large models.

    python benchmarks/scale.py [--layouts 1x8 8x8 32x8 128x8] [--strategies ddp_mean fsdp2 ...]
    python benchmarks/scale.py --rates [--flops 6e13] [--network 25e9]

The first command times one check of each strategy on simulated ranks. The second measures how fast
this machine computes a big batch in float64 and compares gradients with it, and works out from that
what a check takes for 1 billion parameters on 2 ranks, 7 billion on 64 and 70 billion on 1,024.
``--flops`` and ``--network`` replace the measured speed of the big batch, and the bytes per second
at which a rank on another host would read it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch
from measured_process import machine
from torch import Tensor, nn

from ddp_equivalence import Case
from ddp_equivalence.checking.simulated import simulate
from ddp_equivalence.comparison.sums import Sums

LAYOUTS = ("1x8", "8x8", "32x8", "128x8")
STRATEGIES = ("ddp_mean", "hybrid", "hsdp", "fsdp2")

SIZES = ((10**9, 2), (7 * 10**9, 64), (70 * 10**9, 1024))
"""Parameters and ranks."""

TOKENS = 2048
"""Tokens of an example."""

TENSORS = 720
"""The parameter tensors of a model of 80 layers with nine in each."""

REFERENCE_BYTES = 16
"""A weight and its gradient in float64."""

FLOPS_PER_TOKEN = 6
"""For each parameter: 2 forward and 4 backward (Kaplan et al. 2020, arXiv 2001.08361)."""

ELEMENTS = 20_000_000


def simulated(layouts: list[str], strategies: list[str]) -> Iterator[str]:
    """One line for each strategy: the seconds of a check on each layout."""
    yield f"{'seconds of a simulated check':<30}" + "".join(f"{one:>10}" for one in layouts)
    for name in strategies:
        cells = []
        for layout in layouts:
            found = simulate(Case(model="mlp", loss="mse_mean", layout=layout), name)
            assert found.outcome == "same", found.failure
            cells.append(f"{found.seconds:>10.1f}")
        yield f"{name:<30}" + "".join(cells)


def elements_per_second() -> float:
    """How many elements of a gradient in float64 a rank compares, on one core."""
    torch.set_num_threads(1)
    right = np.random.default_rng(0).standard_normal(ELEMENTS)
    measured = torch.from_numpy(right * (1 + 1e-16))

    def compare() -> None:
        Sums().take(0, measured, right, 1.0)

    return ELEMENTS / seconds_of(compare)


def flops_per_second() -> float:
    """Of the forward and backward pass of a linear layer in float64, on all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    layer = nn.Linear(2048, 2048, bias=False).double()
    rows = torch.randn(512, 2048, dtype=torch.float64, requires_grad=True)

    def step() -> None:
        value: Tensor = layer(rows).sum()
        value.backward()

    return FLOPS_PER_TOKEN * 2048 * 2048 * 512 / seconds_of(step)


def seconds_of(act: Callable[[], None]) -> float:
    """The median of five runs, after one that does not count."""
    times = []
    for _ in range(6):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def worked_out(flops: float, elements: float, network: float) -> Iterator[str]:
    """One line for each size: what a check of sharded parameters takes, with one example a rank."""
    yield (
        f"big batch {flops:.1e} operations/s, comparison {elements:.1e} elements/s on a core, "
        f"network {network:.1e} bytes/s; one example of {TOKENS:,} tokens on each rank"
    )
    yield (
        f"{'parameters':>14}{'ranks':>7}{'big batch':>13}{'its memory':>12}{'a rank reads':>14}"
        f"{'and compares':>14}{'all ranks read':>16}"
    )
    for parameters, ranks in SIZES:
        reference = FLOPS_PER_TOKEN * parameters * TOKENS * ranks / flops
        own = parameters / ranks
        yield (
            f"{parameters:>14,}{ranks:>7,}{reference / 3600:>11,.1f} h"
            f"{parameters * REFERENCE_BYTES / 2**30:>8,.0f} GiB"
            f"{own * 8 / 2**30:>10,.1f} GiB"
            f"{own / elements:>12,.1f} s"
            f"{parameters * 8 / network:>14,.0f} s"
        )
    sent = len(pickle.dumps(Sums().sent()))
    ranks = SIZES[-1][1]
    yield (
        f"a rank sends {sent} bytes for each parameter tensor: {ranks:,} ranks "
        f"{sent * TENSORS * ranks / 2**20:,.0f} MiB for {TENSORS} tensors"
    )


def main() -> int:
    """Print the table that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--flops", type=float)
    parser.add_argument("--network", type=float, default=25e9)
    arguments = parser.parse_args()
    print(machine(), flush=True)
    if arguments.rates:
        flops = arguments.flops or flops_per_second()
        lines = worked_out(flops, elements_per_second(), arguments.network)
    else:
        lines = simulated(arguments.layouts, arguments.strategies)
    for line in lines:
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
