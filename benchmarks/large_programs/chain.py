"""The model of the large programs: a chain of square linear layers of any length."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

PARAMETERS = int(os.environ["BENCHMARK_PARAMETERS"])
CHECKS = int(os.environ["BENCHMARK_CHECKS"])
DTYPE: torch.dtype = getattr(torch, os.environ["BENCHMARK_DTYPE"])
STEP = os.environ.get("BENCHMARK_STEP", "ddp")
IN_TURN = os.environ.get("BENCHMARK_IN_TURN") == "1"
"""The big batch comes before the ranks, because both together do not fit into memory."""

WIDEST = 1000
VERY_LARGE = 500_000_000
EXAMPLES = 4
RANKS = 2

WARM_UP = min(PARAMETERS, WIDEST**2)
"""The parameters of the first check. It is not measured, because it includes the start."""


def width_of(parameters: int) -> int:
    """The width of each layer: one layer up to a million parameters, else layers of a million; of
    16 million from half a billion on.
    """
    return min(WIDEST if parameters < VERY_LARGE else 4 * WIDEST, math.isqrt(parameters))


def build(parameters: int) -> nn.Module:
    """A model of about this many parameters, whose values keep their size from layer to layer."""
    width = width_of(parameters)
    layers = [
        nn.Linear(width, width, bias=False, dtype=DTYPE)
        for _ in range(max(1, round(parameters / width**2)))
    ]
    with torch.no_grad():
        for layer in layers:
            layer.weight *= math.sqrt(3)
    return nn.Sequential(*layers)


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """A mean over examples, so that DDP's average is the gradient of the big batch."""
    return model(rows).square().mean()


def step(model: nn.Module, rows: Tensor) -> None:
    """The step on one rank."""
    if STEP == "ddp":
        wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
        loss(wrapper, rows).backward()
        return
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    loss(model, rows).backward()


def peak_bytes() -> int:
    """The peak memory of this process in bytes (Linux).

    ``ru_maxrss`` would include the process before its exec.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
