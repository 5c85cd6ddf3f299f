"""Reads the gradient of each parameter, or the part of it that is on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_equivalence.comparison.blocks import block_of
from ddp_equivalence.comparison.gradients import ElementSample
from ddp_equivalence.measurement.calls import distance_of, plain
from ddp_equivalence.measurement.whole_tensors import (
    FlatParameters,
    Place,
    flat_gradient,
    is_flattened,
    is_sharded,
    part_in_shard,
)

GradientVersion = tuple[float, ...] | None
"""The id and the version of a gradient; None if there is none."""

UNKNOWN = torch.tensor([-1])
"""Stands for the numbers of elements that are not known."""

SUMMED = 1_000
"""The version of a shard is seen in the sum of so many elements, too."""


class Kept(NamedTuple):
    """The sampled elements of a gradient that are on this rank, and their numbers among all that
    are sampled, shape (elements,); None if it has all of them.
    """

    values: Tensor
    numbers: Tensor | None = None

    def same_places(self, other: Kept) -> bool:
        """True if these are the same elements, so that their values can be compared."""
        if self.numbers is None or other.numbers is None:
            return self.numbers is other.numbers and len(self.values) == len(other.values)
        return torch.equal(self.numbers, other.numbers)


def thinned_part(kept: Kept, sampled: int, most: int) -> Kept:
    """At most about ``most`` of the elements that are ``sampled`` of the whole gradient."""
    distance = distance_of(sampled, most)
    if kept.numbers is None:
        return Kept(kept.values[::distance])
    chosen = kept.numbers % distance == 0
    return Kept(kept.values[chosen], kept.numbers[chosen] // distance)


class GradientsHere:
    """The gradients of these parameters of ``model`` on this rank, wherever a step puts them:
    ``fully_shard`` replaces parameters by shards, and FSDP1 by parts of flat parameters, which are
    seen if they are made inside ``recorded``.

    ``sample``: the elements of each gradient that are kept. ``names_by_id``: gets the shards, too.
    ``parts``: of gradients that were read in part, the numbers of the sampled elements.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        sample: ElementSample[str],
        names_by_id: dict[int, str],
    ) -> None:
        self.parameters = dict(parameters)
        self.parts: dict[str, Tensor] = {}
        self._names_by_id = names_by_id
        self._sample = sample
        self._flat = FlatParameters()
        self.recorded = self._flat.recorded
        self._places: dict[str, Place] = {}
        self._flat_count = 0
        self._modules = {id(module): name for name, module in model.named_modules()}
        names = {id(one): name for name, one in parameters.items()}
        self._owners = {
            names[id(one)]: (module, key)
            for module in model.modules()
            for key, one in module._parameters.items()
            if id(one) in names
        }

    def find_shards(self) -> None:
        """Look for shards that have taken the place of parameters since the last call."""
        for name, (module, key) in self._owners.items():
            now = module._parameters.get(key)
            if now is not None and now is not self.parameters[name] and is_sharded(now):
                self.parameters[name] = now
                self._names_by_id[id(now)] = name
        if self._flat.count != self._flat_count:
            self._flat_count = self._flat.count
            self._places = self._flat.places(self._modules)
            self.parts |= {
                name: torch.empty(0) for name, one in self._places.items() if one.is_elsewhere
            }

    def is_replaced(self, name: str, parameter: object) -> bool:
        """True if the model has a shard in place of this parameter, which it was built with."""
        self.find_shards()
        if name in self._places:
            return not is_flattened(parameter)
        return name in self.parameters and self.parameters[name] is not parameter

    def sharded(self) -> set[str]:
        """The parameters whose places shards, or parts of flat parameters, have taken."""
        self.find_shards()
        return {*self._places} | {name for name, one in self.parameters.items() if is_sharded(one)}

    def is_elsewhere(self, name: str) -> bool:
        """True if other ranks have all of this parameter."""
        return name in self._places and self._places[name].is_elsewhere

    def state(self, name: str) -> GradientVersion:
        """Changes whenever something writes to the gradient, or puts another one in its place."""
        gradient = self._owner(name)
        if gradient is None:
            return None
        try:
            if not is_sharded(gradient):
                return id(gradient), gradient._version
            # Torch's foreach functions, with which it clips, raise neither version.
            local = gradient._local_tensor
            sums = 0.0
            if local.device.type == "cpu":  # elsewhere this would wait for the device at every line
                sums = float(local.detach().flatten()[:SUMMED].nan_to_num().sum())
            return id(gradient), gradient._version, local._version, sums
        except RuntimeError:  # a tensor that was made in inference mode has no version
            return id(gradient), -1

    def here(self, name: str) -> Tensor | None:
        """The gradient, or the part of it that is on this rank, as it is in memory."""
        gradient: Any = self._owner(name)
        if gradient is not None and is_sharded(gradient):
            gradient = gradient._local_tensor  # to_local would be watched as a call of the step
        found: Tensor | None = gradient
        return found

    def kept(self, name: str) -> Kept | None:
        """The sampled elements; None if there is no gradient, or none that can be read."""
        gradient = self._owner(name)
        try:
            if gradient is None:
                return None
            if is_sharded(gradient):
                return self._of_block(name, gradient)
            if name in self._places:
                return self._of_flat(name)
            return Kept(self._sample.of_one(name, plain(gradient.detach())))
        except Exception:  # never fail in the user's step
            return None

    def _owner(self, name: str) -> Any:
        place = self._places.get(name)
        return self.parameters[name].grad if place is None else flat_gradient(place)

    def _of_block(self, name: str, gradient: Any) -> Kept | None:
        block, local = block_of(gradient), self.here(name)
        if block is None or local is None:
            self.parts[name] = UNKNOWN
            return None
        numbers, places = block.places_of(self._sampled(name))
        values = plain(local).reshape(-1)[torch.from_numpy(places)]
        return self._part(name, values, torch.from_numpy(numbers))

    def _of_flat(self, name: str) -> Kept | None:
        found = part_in_shard(self._places[name])
        if found is None:
            if self._places[name].is_elsewhere:  # after a pass without synchronisation, once more
                self.parts[name] = torch.empty(0)
            return None
        local, part = found
        if part is None:
            self.parts.pop(name, None)
            return Kept(self._sample.of_one(name, local))
        sampled = torch.tensor(self._sampled(name))
        numbers = torch.nonzero((sampled >= part.start) & (sampled < part.stop)).flatten()
        return self._part(name, local.reshape(-1)[sampled[numbers] - part.start], numbers)

    def _sampled(self, name: str) -> range:
        return range(0, self._sample.sizes[name], self._sample.stride[name])

    def _part(self, name: str, values: Tensor, numbers: Tensor) -> Kept:
        values = values.detach().to("cpu", torch.float64, copy=True)
        if len(numbers) == self._sample.size(name):
            self.parts.pop(name, None)
            return Kept(values)
        self.parts[name] = numbers
        return Kept(values, numbers)
