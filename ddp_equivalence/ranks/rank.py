"""What a rank knows of itself; this is what a step receives as its third argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Rank:
    """``rank`` of ``world_size``; ``local_rank`` of ``local_world_size`` on ``node`` of ``nodes``.

    Nodes are simulated on one host. ``device`` is where the model and the shard already are, and
    ``backend`` what the default process group was made with.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    device: torch.device
    backend: str
