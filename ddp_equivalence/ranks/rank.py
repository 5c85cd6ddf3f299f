"""A rank's position among the others, which a step receives as its third argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rank:
    """Rank ``rank`` of ``world_size``, which is ``local_rank`` of ``local_world_size`` on its node.

    The node is ``node`` of ``nodes``; nodes are simulated on one host. ``device`` is where the
    model and the shard already are. ``backend`` is that of the default process group.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    device: torch.device
    backend: str
