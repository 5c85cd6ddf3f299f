"""The same with this suite."""

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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, Verdict, check

DEADLINE = 500.0


def case_of(parameters: int) -> Case:
    """The chain with that many parameters."""

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
    """What is held to the big batch."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


def step_that_tells(model: nn.Module, shard: Tensor, rank: Rank) -> None:
    """The same, and prints how much memory the rank has held so far."""
    step(model, shard, rank)
    print(peak_bytes())


def same(parameters: int, train: object = step) -> Verdict:
    """One check; raises if its outcome is another one."""
    verdict = check(case_of(parameters), train, deadline=DEADLINE)
    if verdict.outcome != "same":
        raise AssertionError(str(verdict))
    return verdict


def peaks() -> tuple[int, int]:
    """The most that the judging process, and that any rank, has held so far."""
    here = peak_bytes()
    told = same(WARM_UP, step_that_tells).output
    return here, max(int(text.split()[-1]) for text in told.values())


def main() -> None:
    """Run the checks, and write what they took."""
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
