"""Outputs of the other ranks come without their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional as collectives

from ddp_equivalence.faults.fault import Fault, Fire


@contextmanager
def detached(fire: Fire) -> Iterator[None]:
    """``dist.all_gather`` in the place of the one that passes gradients on."""

    def all_gather(tensor: Tensor, group: Any = None) -> tuple[Tensor, ...]:
        found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, tensor.detach(), group=group)
        found[dist.get_rank(group)] = tensor
        fire()
        return tuple(found)

    with patch.object(collectives, "all_gather", all_gather):
        yield


FAULT = Fault(
    name="gather_without_gradient",
    sentence="dist.all_gather gathers the outputs, and only the rank's own keep their gradient.",
    in_torch=detached,
    strategies=("ddp_gathered",),
    pairs=(("mlp", "contrastive"), ("mlp", "mse_mean"), ("gru_tied", "token_mean")),
)
