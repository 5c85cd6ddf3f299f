"""The rank and node of this process, from torch.distributed and the variables of torchrun."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def own_node() -> int:
    """The node of this rank; 0 where the environment does not say."""
    return int(os.environ.get("GROUP_RANK", "0"))


def local_world_size() -> int:
    """The number of ranks on this node; all ranks where the environment does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def is_last_rank() -> bool:
    """True on the rank with the highest number, if there are at least two ranks."""
    return 0 < dist.get_rank() == dist.get_world_size() - 1


def node_of_every_rank(device: torch.device) -> list[int]:
    """The node of every rank, in the order of ranks. All ranks must call this together."""
    nodes = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(nodes, torch.full((1,), float(own_node()), device=device))
    return [int(node) for node in torch.cat(nodes).tolist()]
