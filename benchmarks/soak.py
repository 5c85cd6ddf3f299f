"""Make thousands of checks on one set of ranks: do memory, descriptors, threads or time grow?

python benchmarks/soak.py [--checks 5000] [--layout 1x2]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank, check
from ddp_equivalence.ranks.warm_ranks import warm_ranks

BLOCKS = 10
EXAMPLES = 16

MOST_GROWTH = 2.0
"""MiB that a process may grow from the second block to the last, since allocators vary."""


def build() -> nn.Module:
    """A small model."""
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    return (
        torch.randn(EXAMPLES, 12, generator=generator),
        torch.randn(EXAMPLES, 3, generator=generator),
    )


def loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Mean squared error."""
    return (model(rows[0]) - rows[1]).square().mean()


def step(model: nn.Module, shard: Any, rank: Rank) -> None:
    """Use DDP with its defaults."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


@dataclass(frozen=True)
class Resources:
    """The memory in MiB, the open descriptors and the threads of a process."""

    memory: float
    descriptors: int
    threads: int


def resources_of(pid: int) -> Resources:
    """Read what a process holds now (Linux)."""
    folder = Path(f"/proc/{pid}")
    status = dict(
        line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line
    )
    return Resources(
        memory=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=len(list((folder / "fd").iterdir())),
        threads=int(status["Threads"]),
    )


def pids_of_ranks() -> list[int]:
    """The ranks that wait for the next check."""
    return [pid for rank_set in warm_ranks().idle() for pid in rank_set.process_ids()]


def main() -> None:
    """Print one line for each block, and what grew; exit with 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checks", type=int, default=5000)
    parser.add_argument("--layout", default="1x2")
    arguments = parser.parse_args()
    if arguments.checks < BLOCKS:
        parser.error(f"--checks {arguments.checks}: at least {BLOCKS}")
    torch.set_num_threads(1)
    blocks: list[tuple[float, list[Resources]]] = []
    print(f"{'checks':>8}  {'ms a check':>10}  judge and each rank: MiB / descriptors / threads")
    for block in range(BLOCKS):
        seconds = []
        size = arguments.checks // BLOCKS
        for number in range(size):
            case = Case(
                model=build,
                batch=batch,
                loss=loss,
                layout=arguments.layout,
                seed=block * size + number,
            )
            started = time.perf_counter()
            verdict = check(case, step)
            seconds.append(time.perf_counter() - started)
            if verdict.outcome != "same":
                raise SystemExit(str(verdict))
        gc.collect()
        resources = [resources_of(pid) for pid in (os.getpid(), *pids_of_ranks())]
        blocks.append((1e3 * statistics.median(seconds), resources))
        cells = "   ".join(
            f"{each.memory:.1f} / {each.descriptors} / {each.threads}" for each in resources
        )
        print(f"{(block + 1) * size:>8}  {blocks[-1][0]:>10.1f}  {cells}", flush=True)
    grown = list(what_grew(blocks[1][1], blocks[-1][1]))
    print(f"sets of ranks started   {warm_ranks().started}")
    print(f"time, last over second  {blocks[-1][0] / blocks[1][0]:.2f}")
    print(f"grew from the second block to the last: {', '.join(grown) or 'nothing'}")
    raise SystemExit(bool(grown) or warm_ranks().started != 1)


def what_grew(before: list[Resources], after: list[Resources]) -> list[str]:
    """A phrase for everything that grew. Process 0 is the judging one."""
    grown = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        name = "judge" if number == 0 else f"rank {number - 1}"
        if new.memory - old.memory > MOST_GROWTH:
            grown.append(f"memory of the {name} by {new.memory - old.memory:.1f} MiB")
        if new.descriptors > old.descriptors:
            grown.append(f"descriptors of the {name} by {new.descriptors - old.descriptors}")
        if new.threads > old.threads:
            grown.append(f"threads of the {name} by {new.threads - old.threads}")
    return grown


if __name__ == "__main__":
    main()
