"""Measure how far rounding moves a right gradient, and how far away the nearest fault is.

    python benchmarks/rounding.py [--seeds 20]

For a right strategy on ranks, and each dtype, it prints the error in eps, over the error of one
device, and over the limit, and the distance of the nearest planted fault in limits. The error is
that of the worst rank, for every parameter.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ddp_equivalence import Case, Verdict, check

MODELS = (
    ("mlp", "mse_mean", "equal"),
    ("conv", "cross_entropy_mean", "equal"),
    ("gru_tied", "token_mean", "uneven"),
    ("attention_tied", "token_mean", "uneven"),
)
LAYOUTS = ("1x2", "2x2", "2x4")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """The figures of one parameter in one verdict."""

    in_eps: float
    over_single: float
    over_limit: float
    fault_in_limits: float


def rows_of(verdict: Verdict, dtype: torch.dtype) -> Iterator[Row]:
    """The figures of every parameter that has a gradient."""
    assert verdict.comparison is not None
    assert verdict.nearest is not None
    assert verdict.analysis is not None
    for parameter in verdict.comparison.parameters:
        if parameter.norm > 0:
            # The check itself measures rounding only if a gradient is beyond its least limit.
            floor = verdict.analysis.floor_of(parameter)
            yield Row(
                in_eps=parameter.error / torch.finfo(dtype).eps,
                over_single=parameter.error / floor if floor else 0.0,
                over_limit=parameter.error / parameter.limit.relative,
                fault_in_limits=verdict.nearest.distance / parameter.limit.relative,
            )


def main() -> None:
    """Print one line for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print(
        "dtype      checks  not same  error in eps    over one device  over limit   fault in limits"
    )
    print("                             median    max    median     max      max             min")
    for dtype in DTYPES:
        verdicts = [
            check(
                Case(model=model, loss=loss, layout=layout, shards=shards, dtype=dtype, seed=seed),
                "ddp_global_mean",
            )
            for model, loss, shards in MODELS
            for layout in LAYOUTS
            for seed in range(seeds)
        ]
        alarms = sum(verdict.outcome != "same" for verdict in verdicts)
        rows = [row for verdict in verdicts for row in rows_of(verdict, dtype)]
        in_eps, single = sorted(row.in_eps for row in rows), sorted(row.over_single for row in rows)
        middle = len(rows) // 2
        print(
            f"{str(dtype).removeprefix('torch.'):<10}{len(verdicts):>7}{alarms:>10}"
            f"{in_eps[middle]:>10.2f}{in_eps[-1]:>7.1f}{single[middle]:>10.2f}{single[-1]:>8.1f}"
            f"{max(row.over_limit for row in rows):>9.2f}"
            f"{min(row.fault_in_limits for row in rows):>16.1e}"
        )


if __name__ == "__main__":
    main()
