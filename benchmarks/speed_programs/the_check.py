"""The check of every program: DDP's gradients on every rank against one big batch, in float64."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANKS = int(os.environ["BENCHMARK_RANKS"])
CHECKS = int(os.environ["BENCHMARK_CHECKS"])
EXAMPLES = 16


def build(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, rows and targets, the same in every process."""
    # torch.manual_seed would format a stack for every device that is not initialised.
    torch.default_generator.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    rows = torch.randn(EXAMPLES, 12, dtype=torch.float64)
    return model, rows, torch.randn(EXAMPLES, 3, dtype=torch.float64)


def big_batch(seed: int) -> Tensor:
    """The gradient of all examples at once, as one vector."""
    model, rows, targets = build(seed)
    nn.functional.mse_loss(model(rows), targets).backward()
    return gradients_of(model)


def distributed(seed: int, rank: int) -> Tensor:
    """The gradient that DDP leaves on this rank, as one vector."""
    model, rows, targets = build(seed)
    each = EXAMPLES // RANKS
    mine = slice(rank * each, (rank + 1) * each)
    ddp = DistributedDataParallel(model)
    nn.functional.mse_loss(ddp(rows[mine]), targets[mine]).backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> Tensor:
    """All gradients of a model as one vector."""
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def assert_same(measured: Tensor, expected: Tensor) -> None:
    """Raise AssertionError if the gradients differ by more than rounding."""
    torch.testing.assert_close(measured, expected, rtol=1e-10, atol=1e-12)


def join_group(rank: int, rendezvous: str) -> None:
    """Join the process group; the ranks find each other through a file."""
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def check_on_rank(seed: int, rank: int) -> None:
    """The whole check, for programs whose ranks assert."""
    assert_same(distributed(seed, rank), big_batch(seed))


def check_in_new_group(rank: int, rendezvous: str, seed: int) -> None:
    """The whole check, for programs that start their ranks for every test."""
    join_group(rank, rendezvous)
    check_on_rank(seed, rank)
    dist.destroy_process_group()
