"""Right steps: DDP with its defaults and with some options, and averaging by hand."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_equivalence import Rank
from tests.equivalence.small_regression import Batch, loss


def ddp(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Use DDP with its defaults, which is right for equal shards and a mean."""
    wrapped = DistributedDataParallel(model)
    loss(wrapped, shard).backward()


def ddp_that_looks_for_unused(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Use DDP for models with parameters that some ranks do not use."""
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    loss(wrapped, shard).backward()


def ddp_that_leaves_buffers(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Use DDP without broadcasts of buffers, which is right if no step changes them."""
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    loss(wrapped, shard).backward()


def by_hand(model: nn.Module, shard: Batch, rank: Rank) -> None:
    """Sum and then divide, whereas DDP divides before it sums."""
    loss(model, shard).backward()
    average(model, rank)


def average(model: nn.Module, rank: Rank) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.world_size
