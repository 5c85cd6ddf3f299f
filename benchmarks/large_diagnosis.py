"""Measure the time and the memory in which planted faults of a large model are named.

    python benchmarks/large_diagnosis.py [--parameters 100000000]

The checks run on two ranks with one thread each, in float64. Seconds are those of a whole check;
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

BENCHMARKS = Path(__file__).parent
FAULTS = (
    "",
    "sum_not_mean",
    "averaged_twice",
    "no_all_reduce",
    "rank_left_out",
    "bucket_not_reduced",
)
DEADLINE = 900.0


def main() -> int:
    """Print the table; return 0 if every cause was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parameters = parser.parse_args().parameters
    os.environ.update(
        BENCHMARK_PARAMETERS=str(parameters), BENCHMARK_CHECKS="1", BENCHMARK_DTYPE="float64"
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(BENCHMARKS / "large_programs"))
    import chain

    from ddp_equivalence import Case, check
    from ddp_equivalence.faults.plant import planted

    def case(size: int) -> Case:
        return Case(
            model=lambda: chain.build(size),
            batch=lambda generator: torch.randn(
                chain.EXAMPLES, chain.width_of(size), generator=generator, dtype=torch.float64
            ),
            loss=chain.loss,
            layout="1x2",
        )

    check(case(chain.WARM_UP), "ddp_mean")
    before = chain.peak_bytes()
    copy = parameters * 8
    print(f"{parameters:,} parameters on 2 ranks, float64; one copy is {copy / 2**20:.0f} MiB")
    print(f"{'planted':<22}{'outcome':<12}{'named':<36}{'seconds':>9}{'copies':>8}")
    all_named = True
    for fault in FAULTS:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        started = time.perf_counter()
        if fault:
            with planted(fault):
                verdict = check(case(parameters), "ddp_mean", deadline=DEADLINE)
        else:
            verdict = check(case(parameters), "ddp_mean", deadline=DEADLINE)
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
