"""A user's tests with this suite: the same model, batch and loss as in the other programs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Case, Rank

RANKS = int(os.environ["BENCHMARK_RANKS"])
CHECKS = int(os.environ["BENCHMARK_CHECKS"])


def build() -> nn.Module:
    """The model."""
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Sixteen examples."""
    return {
        "rows": torch.randn(16, 12, generator=generator),
        "targets": torch.randn(16, 3, generator=generator),
    }


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(batch["rows"]), batch["targets"])


def step(model: nn.Module, shard: dict[str, Tensor], rank: Rank) -> None:
    """The step that is compared with the big batch."""
    ddp = DistributedDataParallel(model)
    loss(ddp, shard).backward()


@pytest.mark.parametrize("seed", range(CHECKS))
def test_step(equivalence: Any, seed: int) -> None:
    """One check."""
    case = Case(model=build, batch=batch, loss=loss, layout=f"1x{RANKS}", seed=seed)
    equivalence.assert_equivalent(case, step)
