"""A rank's position among the others, which a step receives as its third argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Rank(int):
    """Rank ``rank`` of ``world_size``, which is ``local_rank`` of ``local_world_size`` on its node.

    The node is ``node`` of ``nodes``; nodes are simulated on one host. ``device`` is where the
    model and the shard already are. ``backend`` is that of the default process group.

    It is also the number ``rank`` itself, so that ``if rank == 0`` means what it means in a
    training script.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    device: torch.device
    backend: str

    def __new__(cls, rank: int, *_: Any, **__: Any) -> Self:
        return super().__new__(cls, rank)

    def __str__(self) -> str:
        return str(self.rank)
