"""Measure the time and the memory in which planted faults of a large model are named.

    python benchmarks/large_diagnosis.py [--parameters 100000000] [--dtype float64]
                                         [--faults sum_not_mean ...] [--step ddp]

The checks run on two ranks with one thread each. Seconds are those of a whole check;
the first line is a right one. Memory is the peak of the judging process above its peak after a
small check, in copies of the gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

BENCHMARKS = Path(__file__).parent
FAULTS = {
    "ddp": (
        *("sum_not_mean", "averaged_twice", "no_all_reduce", "rank_left_out"),
        "bucket_not_reduced",
    ),
    "fsdp2": ("gradient_sync_off", "reduce_dtype"),
}
"""The faults that are planted, beside none."""

DEADLINE = 900.0


def main() -> int:
    """Print the table; return 0 if every cause was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--step", choices=FAULTS, default="ddp")
    parser.add_argument("--faults", nargs="+")
    arguments = parser.parse_args()
    faults = arguments.faults or ("", *FAULTS[arguments.step])
    parameters, dtype = arguments.parameters, getattr(torch, arguments.dtype)
    os.environ.update(
        BENCHMARK_PARAMETERS=str(parameters), BENCHMARK_CHECKS="1", BENCHMARK_DTYPE=arguments.dtype
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(BENCHMARKS / "large_programs"))
    import chain

    from ddp_equivalence import Case, Rank, check
    from ddp_equivalence.faults.plant import planted

    def case(size: int) -> Case:
        return Case(
            model=lambda: chain.build(size),
            batch=lambda generator: torch.randn(
                chain.EXAMPLES, chain.width_of(size), generator=generator, dtype=dtype
            ),
            loss=chain.loss,
            layout="1x2",
            dtype=dtype,
        )

    def step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
        chain.step(model, shard)

    # Faults of sharding are planted in the strategy, which shards each layer.
    subject = step if arguments.step == "ddp" else arguments.step
    check(case(chain.WARM_UP), subject)
    before = chain.peak_bytes()
    copy = parameters * dtype.itemsize
    print(
        f"{parameters:,} parameters on 2 ranks, {arguments.step}, {arguments.dtype}; one copy is "
        f"{copy / 2**20:.0f} MiB"
    )
    print(f"{'planted':<22}{'outcome':<12}{'named':<36}{'seconds':>9}{'copies':>8}")
    all_named = True
    for fault in faults:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        started = time.perf_counter()
        if fault:
            with planted(fault):
                verdict = check(case(parameters), subject, deadline=DEADLINE)
        else:
            verdict = check(case(parameters), subject, deadline=DEADLINE)
        seconds = time.perf_counter() - started
        copies = (chain.peak_bytes() - before) / copy
        named = ", ".join(finding.cause for finding in verdict.findings if finding.accepted)
        all_named &= named.startswith(fault) and bool(fault) == (verdict.outcome == "different")
        print(
            f"{fault or 'nothing':<22}{verdict.outcome:<12}{named:<36}{seconds:>9.1f}"
            f"{copies:>8.2f}",
            flush=True,
        )
    return int(not all_named)


if __name__ == "__main__":
    raise SystemExit(main())
