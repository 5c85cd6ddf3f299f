"""Does the diagnosis of a large model name its cause, in which time, and in how much memory?

    python benchmarks/large_diagnosis.py [--parameters 100000000]

Two ranks with one thread each, float64; the faults of the suite, planted. Seconds are of the whole
check beside those of a right one; memory is the most that the judging process held above what it
held after a small check, in copies of the gradients.
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
    """Print the table; 0 if every cause was named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parameters = parser.parse_args().parameters
    os.environ.update(
        BENCHMARK_PARAMETERS=str(parameters), BENCHMARK_CHECKS="1", BENCHMARK_DTYPE="float64"
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(BENCHMARKS / "large_worlds"))
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
    good = True
    for fault in FAULTS:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        started = time.perf_counter()
        if fault:
            with planted(fault):
                verdict = check(case(parameters), "ddp_mean", deadline=DEADLINE)
        else:
            verdict = check(case(parameters), "ddp_mean", deadline=DEADLINE)
        seconds = time.perf_counter() - started
        copies = (chain.peak_bytes() - before) / copy
        named = ", ".join(one.cause for one in verdict.findings if one.accepted)
        good &= named.startswith(fault) and bool(fault) == (verdict.outcome == "different")
        print(
            f"{fault or 'nothing':<22}{verdict.outcome:<12}{named:<36}{seconds:>9.1f}"
            f"{copies:>8.2f}",
            flush=True,
        )
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
