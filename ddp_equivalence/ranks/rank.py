"""A rank's position among the others, which a step receives as its third argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch

heard_by: list[Callable[[Any], None]] = []
"""What ``Rank.read`` calls in this process."""


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

    def read(self, indices: Iterable[int] | torch.Tensor) -> None:
        """Say which examples the model is called with from here on, until the next call of this.

        ``indices``: their positions in the batch that the step was given, from 0; of a tensor, the
        elements of its one dimension. Call it in the process of the rank, just before the model.

        Only a step needs this that makes other rows of the examples, so that they cannot be
        recognised by their values: it tokenises, augments or packs them. The gradients are compared
        with those of the examples that were named, so to name others makes nothing the same. Rows
        that are recognised count, whatever was named.

        Raises TypeError if an index is no whole number, and ValueError if no example has it.
        Outside of a check it does nothing.
        """
        for listener in heard_by:
            listener(indices)
