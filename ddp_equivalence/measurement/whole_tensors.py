"""Reads the weights and gradients of a model whole, however they are sharded over the ranks.

They may be shards of DTensors, as FSDP2, its hybrid form and tensor parallelism leave them, or
parts of the flat parameters of FSDP1. All ranks must call these methods in the same order, since
they gather the shards. No evidence of a step has the collectives that this takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence.comparison.digest import digest
from ddp_equivalence.comparison.gradients import gathered, update_of
from ddp_equivalence.measurement import flat_parameters
from ddp_equivalence.measurement.flat_parameters import FlatParameters, Place
from ddp_equivalence.measurement.sharding import OF_SHARDING
from ddp_equivalence.ranks.collectives import of_the_suite

if TYPE_CHECKING:
    from ddp_equivalence.measurement.parameter_names import ParameterNames


class WholeTensors:
    """``names``: those of the parameters of ``model`` before the step. Flat parameters are seen if
    they are made inside ``recorded``.
    """

    def __init__(self, model: nn.Module, names: ParameterNames) -> None:
        self._model = model
        self._names = names
        self._flat = FlatParameters()
        self.recorded = self._flat.recorded

    def weights(self) -> dict[str, Tensor]:
        """A copy of every weight."""
        return {name: one.clone() for name, one in self._weights().items()}

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter. One that is not sharded is not copied."""
        parameters, places = self._found()
        found = {name: parameter.grad for name, parameter in parameters.items()}
        if not places and not any(map(_is_sharded, parameters.values())):
            return found
        with of_the_suite(), torch.no_grad():
            flat = _of_places(places, flat_parameters.gradients)
            return self._in_order(_gathered(found, parameters) | flat)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters as they are now, as far as they are tensors of their own."""
        return self._names.parameters(self._model)

    def trained(self) -> set[str]:
        """The names of the parameters that require a gradient."""
        parameters, places = self._found()
        return {name for name, one in (parameters | places).items() if one.requires_grad}

    def whole(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """These gradients of parameters, whole, and beside them those inside flat parameters."""
        parameters, places = self._found()
        own = {name: one for name, one in parameters.items() if name in gradients}
        if not places and not any(map(_is_sharded, own.values())):
            return gradients
        with of_the_suite(), torch.no_grad():
            flat = _of_places(places, flat_parameters.gradients)
            plain = {name: gradients[name] for name in own}
            return self._in_order(_gathered(plain, own) | flat)

    def updates(self, before: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """How far every weight has moved; its value, if it was not there before."""
        trained = self.trained()
        return {
            name: update_of(weight, before.get(name), frozen=name not in trained)
            for name, weight in self._weights().items()
        }

    def updates_to(
        self, returned: Mapping[str, Tensor | None], before: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """How far every weight that the step returned has moved."""
        parameters = self._names.parameters(self._model)
        found: dict[str, Tensor | None] = {}
        for name, weight in returned.items():
            start = before.get(name)
            if weight is None or start is None or weight.shape != start.shape:
                found[name] = weight
            else:
                frozen = name in parameters and not parameters[name].requires_grad
                found[name] = update_of(weight.detach().to(start.device), start, frozen)
        return found

    def digest(self) -> str:
        """A digest of the weights. It does not change if the step renames or adds parameters."""
        now = self._weights()
        return digest((name, now.get(name)) for name in self._names.shapes)

    def returned(self, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """What the step returned, under the model's own names and whole: also flat parameters,
        views of them, and the gradients of both. Raises as ``ParameterNames.of_returned`` does.
        """
        if not self._flat and not any(
            one is not None and _is_sharded(one) for one in tensors.values()
        ):
            return self._names.of_returned(self._model, tensors)
        with of_the_suite(), torch.no_grad():
            opened: dict[str, Tensor | None] = {}
            for name, one in tensors.items():
                whole = None if one is None else self._flat.opened(one, self._names.modules())
                opened |= {name: one} if whole is None else whole
            by_name = self._names.of_returned(self._model, opened)
            views = [one for one in by_name.values() if one is not None and self._flat.holds(one)]
            _, places = self._found() if views else ({}, {})
            weights = any(isinstance(one, nn.Parameter) for one in views)
            read: Callable[[Any], Iterable[Any]] = (
                flat_parameters.weights if weights else flat_parameters.gradients
            )
            flat = _of_places({name: places[name] for name in by_name if name in places}, read)
            return {
                name: flat.get(name) if one is None or name in flat else gathered(one)
                for name, one in by_name.items()
            }

    def give_gradients(self, given: Mapping[str, Tensor | None]) -> None:
        """Put whole gradients, such as the step returned, where an optimizer finds them."""
        parameters, places = self._found()
        for name, parameter in parameters.items():
            one = given.get(name)
            parameter.grad = None if one is None else _like(one.detach(), parameter)
        for handle, numbered in _by_handle(places).items():
            ordered = sorted(numbered, key=lambda pair: pair[1])
            flat_parameters.give_gradients(handle, [given.get(name) for name, _ in ordered])

    def _weights(self) -> dict[str, Tensor]:
        parameters, places = self._found()
        if not places and not any(map(_is_sharded, parameters.values())):
            return {name: one.detach() for name, one in parameters.items()}
        with of_the_suite(), torch.no_grad():
            flat = _of_places(places, flat_parameters.weights)
            return self._in_order(
                {name: gathered(one.detach()) for name, one in parameters.items()} | flat
            )

    def _found(self) -> tuple[dict[str, nn.Parameter], dict[str, Place]]:
        """The parameters of the model, and the places of those that are inside flat ones."""
        for module in _fsdp_modules(self._model):
            module.reshard()  # a forward pass without backward leaves the weights gathered
        places = self._flat.places(self._names.modules()) if self._flat else {}
        parameters = self._names.parameters(self._model)
        places = {self._names.first_of(name): place for name, place in places.items()}
        return {name: one for name, one in parameters.items() if name not in places}, places

    def _in_order(self, found: dict[str, Any]) -> dict[str, Any]:
        """Those of the model first, in its order, as the other ranks have them."""
        known = [name for name in self._names.shapes if name in found]
        return {name: found[name] for name in (*known, *found)}


def _is_sharded(tensor: Tensor) -> bool:
    """True for a DTensor. Its class takes long to import."""
    return hasattr(tensor, "full_tensor")


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    kind = getattr(sys.modules.get(OF_SHARDING), "FSDPModule", None)
    return (one for one in model.modules() if kind is not None and isinstance(one, kind))


def _gathered(
    found: Mapping[str, Tensor | None], parameters: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    """The gradients, whole. A rank that lacks its shard of one counts as a rank with zeros there,
    or else those that have it would wait for the rank.
    """
    sharded = {name: one for name, one in parameters.items() if _is_sharded(one)}
    on_mesh: dict[Any, list[str]] = {}
    for name, parameter in sharded.items():
        on_mesh.setdefault(parameter.device_mesh, []).append(name)
    whole = dict(found)
    for mesh, names in on_mesh.items():
        held = [found[name] is not None for name in names]
        device = sharded[names[0]].to_local().device
        anywhere = torch.tensor(held, dtype=torch.int32, device=device)
        for group in mesh.get_all_groups():
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        for name, has, somebody_has in zip(names, held, anywhere.tolist(), strict=True):
            if somebody_has:
                one = found[name] if has else torch.zeros_like(sharded[name])
                assert one is not None
                whole[name] = gathered(one.detach())
    return whole


def _by_handle(places: Mapping[str, Place]) -> dict[Any, list[tuple[str, int]]]:
    found: dict[Any, list[tuple[str, int]]] = {}
    for name, place in places.items():
        found.setdefault(place.handle, []).append((name, place.number))
    return found


def _of_places(places: Mapping[str, Place], read: Callable[[Any], Iterable[Any]]) -> dict[str, Any]:
    """What ``read`` finds in the flat parameters, under the names of the model."""
    found: dict[str, Any] = {}
    for handle, numbered in _by_handle(places).items():
        values = list(read(handle))
        found |= {name: values[number] for name, number in numbered}
    return found


def _like(whole: Tensor, parameter: Any) -> Tensor:
    """A whole tensor in the dtype of a parameter, and sharded as it is."""
    whole = whole.to(parameter.dtype)
    if not _is_sharded(parameter) or _is_sharded(whole):
        return whole
    distribute: Any = sys.modules["torch.distributed.tensor"].distribute_tensor
    sharded: Tensor = distribute(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return sharded
