"""The outputs of other ranks are gathered, and no gradient flows back to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn import functional as collectives

from ddp_equivalence.faults.fault import Fault, RecordFiring


@contextmanager
def gather_detached(record_firing: RecordFiring) -> Iterator[None]:
    """``dist.all_gather`` replaces the gather through which gradients flow back."""

    def all_gather(tensor: Tensor, group: Any = None) -> tuple[Tensor, ...]:
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, tensor.detach(), group=group)
        gathered[dist.get_rank(group)] = tensor
        record_firing()
        return tuple(gathered)

    with patch.object(collectives, "all_gather", all_gather):
        yield


FAULT = Fault(
    name="gather_without_gradient",
    sentence="Outputs go through dist.all_gather, so only the rank's own outputs keep their graph.",
    break_torch=gather_detached,
    strategies=("ddp_gathered",),
    pairs=(("mlp", "contrastive"), ("mlp", "mse_mean"), ("gru_tied", "token_mean")),
    own_step="gathering",
    acts_at=("gather",),
)
