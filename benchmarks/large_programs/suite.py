"""The same checks with this suite."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from chain import (
    CHECKS,
    DTYPE,
    EXAMPLES,
    PARAMETERS,
    RANKS,
    WARM_UP,
    build,
    loss,
    peak_bytes,
    width_of,
)
from chain import step as train
from torch import Tensor, nn

from ddp_equivalence import Case, Rank, Verdict, check

DEADLINE = 500.0


def case_of(parameters: int) -> Case:
    """A case of the chain with this many parameters."""

    def batch(generator: torch.Generator) -> Tensor:
        return torch.randn(EXAMPLES, width_of(parameters), generator=generator)

    return Case(
        model=lambda: build(parameters),
        batch=batch,
        loss=loss,
        layout=f"1x{RANKS}",
        dtype=DTYPE,
    )


def step(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    """The step that is compared with the big batch."""
    train(model, shard)


def step_that_prints_its_peak(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    """Make the step, and print the rank's peak memory."""
    step(model, shard, rank)
    print(peak_bytes())


def same(parameters: int, train: object = step) -> Verdict:
    """Make one check; raise AssertionError if its outcome is not "same"."""
    verdict = check(case_of(parameters), train, deadline=DEADLINE)
    if verdict.outcome != "same":
        raise AssertionError(str(verdict))
    return verdict


def peaks() -> tuple[int, int]:
    """The peak memory of this process, and the largest of all ranks."""
    here = peak_bytes()
    output = same(WARM_UP, step_that_prints_its_peak).output
    return here, max(int(text.split()[-1]) for text in output.values())


def main() -> None:
    """Run the checks, and write their seconds and the peak memory."""
    seconds = []
    same(WARM_UP)
    before = peaks()
    for _ in range(CHECKS):
        started = time.monotonic()
        verdict = same(PARAMETERS)
        seconds.append(time.monotonic() - started)
    result = {
        "seconds": seconds,
        "before": before,
        "after": peaks(),
        "elements": verdict.comparison.elements,
        "error": verdict.error,
        "limit": verdict.limit,
    }
    Path(os.environ["BENCHMARK_RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
