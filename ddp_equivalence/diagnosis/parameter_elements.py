"""Where the elements of each parameter are in a gradient that is written as one vector."""

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

    If the model is too large, ``sample`` keeps only every n-th element of each parameter.
    ``of_model``: the number of elements of the whole model, if these are some parameters only.
    """

    sample: ElementSample[str]
    of_model: int = 0

    @property
    def whole_total(self) -> int:
        """The number of elements of the whole model, also where these are some parameters only."""
        return self.of_model or self.total

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sample.sizes)

    @property
    def total(self) -> int:
        """The number of elements of all parameters, including those outside the sample."""
        return self.total_of(self.names)

    def total_of(self, names: Iterable[str]) -> int:
        """The number of elements of these parameters, including those outside the sample."""
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
        """The elements of these parameters alone."""
        return ParameterElements(self.sample.only(names), self.whole_total)

    def combined(self, inside: Tensor, outside: Tensor, names: frozenset[str]) -> Tensor:
        """The values of ``inside`` for these parameters, and of ``outside`` for all others."""
        combined = outside.clone()
        for name in names & self.places.keys():
            combined[..., self.places[name]] = inside[..., self.places[name]]
        return combined
