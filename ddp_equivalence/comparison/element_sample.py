"""Large gradients are sampled: only some of their elements are used to explain a difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

import torch
from torch import Tensor

from ddp_equivalence.comparison.gradients import Key, dense


@dataclass(frozen=True)
class ElementSample(Generic[Key]):
    """Which elements of flattened gradients are kept: every ``stride``-th, beginning at the first.

    Gradients are added element by element, so a sample also shows which gradients were added.
    ``sizes``: the number of elements of each gradient. ``stride``: the distance from each kept
    element to the next.
    """

    sizes: Mapping[Key, int]
    stride: Mapping[Key, int]

    @classmethod
    def at_most(cls, elements: int, sizes: Mapping[Key, int]) -> ElementSample[Key]:
        """Keep all elements if they are few enough, else about equally many of each gradient."""
        if sum(sizes.values()) <= elements:
            return cls(sizes, dict.fromkeys(sizes, 1))
        each = max(1, elements // len(sizes))
        # An odd stride visits the columns of a matrix in turn. An even one could skip some columns.
        return cls(sizes, {key: -(-size // each) | 1 for key, size in sizes.items()})

    def only(self, keys: Sequence[Key]) -> ElementSample[Key]:
        """The same sample, but only of these gradients."""
        return ElementSample(
            {key: self.sizes[key] for key in keys}, {key: self.stride[key] for key in keys}
        )

    @property
    def is_whole(self) -> bool:
        """True if every element is kept."""
        return all(stride == 1 for stride in self.stride.values())

    def size(self, key: Key) -> int:
        """How many elements of this gradient are kept."""
        return len(range(0, self.sizes[key], self.stride[key]))

    def of_chunk(self, key: Key, offset: int, values: Tensor) -> Tensor:
        """A copy of the kept elements among ``values``, which begin at ``offset``."""
        stride = self.stride[key]
        return (values if stride == 1 else values[-offset % stride :: stride]).clone()

    def of_one(self, key: Key, gradient: Tensor) -> Tensor:
        """A copy of the kept elements of one gradient, as float64 on the CPU."""
        flat = dense(gradient).reshape(-1)[:: self.stride[key]]
        return flat.to("cpu", torch.float64, copy=True)

    def of(self, gradients: Mapping[Key, Tensor | None]) -> Tensor:
        """The kept elements of all gradients as one vector; None counts as zeros."""
        return self.joined(
            {key: self.of_one(key, one) for key, one in gradients.items() if one is not None}
        )

    def joined(self, kept: Mapping[Key, Tensor]) -> Tensor:
        """One float64 vector of the elements kept of each gradient; zeros for a missing one."""
        return torch.cat(
            [
                kept[key].double()
                if key in kept
                else torch.zeros(self.size(key), dtype=torch.float64)
                for key in self.sizes
            ]
        )
