"""Which node a process is on, as torchrun tells it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def node() -> int:
    """The node of this rank; 0 where nobody says."""
    return int(os.environ.get("GROUP_RANK", "0"))


def local_world_size() -> int:
    """The ranks on this node; all of them where nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def last_rank() -> bool:
    """True on the rank with the highest number, if there is another."""
    return 0 < dist.get_rank() == dist.get_world_size() - 1


def nodes_of_all(like: torch.Tensor) -> list[int]:
    """The node of every rank."""
    found = [torch.zeros(1, device=like.device) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.full((1,), float(node()), device=like.device))
    return [int(one) for one in torch.cat(found).tolist()]
