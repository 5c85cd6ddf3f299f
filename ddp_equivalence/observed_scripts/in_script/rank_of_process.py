"""Which rank a process of a script is."""

from __future__ import annotations

import os

import torch.distributed as dist


def rank_of_process() -> int:
    """The rank in the group of all, or the one that a launcher has told."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks in that group, or the one that a launcher has told."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))
