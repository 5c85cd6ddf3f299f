"""Which elements of large gradients are kept to take a difference apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_equivalence.comparison.chunks import Chunk
from ddp_equivalence.comparison.gradients import Gradients, dense


@dataclass(frozen=True)
class ElementSample:
    """Which elements of flattened gradients are kept: every ``stride[name]``-th, from the first.

    Sums of gradients are sums in every element, so whatever mixes them shows in a selection too.
    """

    sizes: Mapping[str, int]
    stride: Mapping[str, int]

    @classmethod
    def at_most(cls, elements: int, sizes: Mapping[str, int]) -> ElementSample:
        """All of them if they are few enough, else about equally many of each parameter."""
        if sum(sizes.values()) <= elements:
            return cls(sizes, dict.fromkeys(sizes, 1))
        each = max(1, elements // len(sizes))
        # Odd, so that the columns of a matrix are met in turn.
        return cls(sizes, {name: -(-size // each) | 1 for name, size in sizes.items()})

    def only(self, names: Sequence[str]) -> ElementSample:
        """The same of these parameters alone."""
        return ElementSample(
            {name: self.sizes[name] for name in names}, {name: self.stride[name] for name in names}
        )

    @property
    def is_whole(self) -> bool:
        return all(stride == 1 for stride in self.stride.values())

    def size(self, name: str) -> int:
        """How many elements of this parameter are kept."""
        return len(range(0, self.sizes[name], self.stride[name]))

    def of_chunk(self, chunk: Chunk) -> Tensor:
        """What is kept of a chunk, as a copy."""
        first = -chunk.offset % self.stride[chunk.name]
        return chunk.values[first :: self.stride[chunk.name]].clone()

    def of_one(self, name: str, gradient: Tensor) -> Tensor:
        """What is kept of one gradient, as float64 on the CPU, in memory of its own."""
        flat = dense(gradient).reshape(-1)[:: self.stride[name]]
        return flat.to("cpu", torch.float64, copy=True)

    def of(self, gradients: Gradients) -> Tensor:
        """What is kept of all as one vector; None counts as zero."""
        return self.joined(
            {name: self.of_one(name, one) for name, one in gradients.items() if one is not None}
        )

    def joined(self, kept: Mapping[str, Tensor]) -> Tensor:
        """What was kept of each as one float64 vector; zeros for what is missing."""
        zeros = {name: self.size(name) for name in self.sizes if name not in kept}
        return torch.cat(
            [
                torch.zeros(zeros[name], dtype=torch.float64)
                if name in zeros
                else kept[name].double()
                for name in self.sizes
            ]
        )
