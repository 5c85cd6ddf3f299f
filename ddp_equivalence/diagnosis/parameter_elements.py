"""Where the elements of each parameter are in the vectors that are explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.comparison.element_sample import ElementSample


@dataclass(frozen=True)
class ParameterElements:
    """All parameters, flattened and joined to one vector of shape (elements,).

    Of a model too large to keep, ``sample`` takes every so many elements of each parameter.
    """

    sample: ElementSample[str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sample.sizes)

    @property
    def total(self) -> int:
        """The number of elements that the parameters have, in the sample or not."""
        return self.total_of(self.names)

    def total_of(self, names: Iterable[str]) -> int:
        """The number of elements that these parameters have, in the sample or not."""
        return sum(self.sample.sizes[name] for name in names)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Parameter -> its place in a vector."""
        places, begin = {}, 0
        for name in self.names:
            end = begin + self.sample.size(name)
            places[name] = slice(begin, end)
            begin = end
        return places

    def positions_of(self, names: Iterable[str]) -> Tensor:
        """The positions of these parameters' elements in a vector."""
        places = [self.places[name] for name in names]
        return torch.cat([torch.arange(place.start, place.stop) for place in places])

    def only(self, names: Sequence[str]) -> ParameterElements:
        """The vectors of these parameters alone."""
        return ParameterElements(self.sample.only(names))

    def combined(self, inside: Tensor, outside: Tensor, names: frozenset[str]) -> Tensor:
        """``inside`` at the elements of these parameters, ``outside`` at all others."""
        combined = outside.clone()
        for name in names & self.places.keys():
            combined[..., self.places[name]] = inside[..., self.places[name]]
        return combined
