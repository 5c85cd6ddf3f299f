"""Reads weights and gradients whole and by name, however they are wrapped or sharded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence.case.training import update_of
from ddp_equivalence.comparison.gradients import digest, gathered
from ddp_equivalence.ranks.collectives import of_the_suite
from ddp_equivalence.ranks.user_modules import spec_of_finders_after

if TYPE_CHECKING:
    from ddp_equivalence.measurement.on_rank import ParameterNames


# Reads the weights and gradients of a model whole, however they are sharded over the ranks.
#
# They may be shards of DTensors, as FSDP2, its hybrid form and tensor parallelism leave them, or
# parts of the flat parameters of FSDP1. All ranks must call these methods in the same order,
# since they gather the shards. No evidence of a step has the collectives that this takes.


class WholeTensors:
    """``names``: those of the parameters of ``model`` before the step. Flat parameters are seen if
    they are made inside ``recorded``; or in that of ``flat``, which models share.
    """

    def __init__(
        self, model: nn.Module, names: ParameterNames, flat: FlatParameters | None = None
    ) -> None:
        self._model = model
        self._names = names
        self.shapes = names.shapes
        self._flat = FlatParameters() if flat is None else flat
        self.recorded = self._flat.recorded

    def weights(self) -> dict[str, Tensor]:
        """A copy of every weight."""
        return {name: one.clone() for name, one in self._weights().items()}

    def gradients(self, *, sharded: bool = False) -> dict[str, Tensor | None]:
        """The gradient of every parameter. One that is not sharded is not copied. ``sharded``:
        leave DTensors as they are, each rank with its own part.
        """
        parameters, places = self._found()
        found = {name: parameter.grad for name, parameter in parameters.items()}
        if not places and not any(map(is_sharded, parameters.values())):
            return found
        with of_the_suite(), torch.no_grad():
            flat = _of_places(places, flat_gradients)
            return self._in_order(_gathered(found, parameters, sharded=sharded) | flat)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters as they are now, as far as they are tensors of their own."""
        return self._names.parameters(self._model)

    def trained(self) -> set[str]:
        """The names of the parameters that require a gradient."""
        parameters, places = self._found()
        return {name for name, one in (parameters | places).items() if one.requires_grad}

    def whole(
        self, gradients: dict[str, Tensor | None], instead: Mapping[int, Tensor]
    ) -> dict[str, Tensor | None]:
        """These gradients of parameters, whole, and beside them those inside flat parameters.

        ``instead``: id of a gradient of a flat parameter -> what to take for it.
        """
        parameters, places = self._found()
        own = {name: one for name, one in parameters.items() if name in gradients}
        if not places and not any(map(is_sharded, own.values())):
            return gradients
        with of_the_suite(), torch.no_grad():
            flat = _of_places(places, partial(flat_gradients, instead=instead))
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
        """The tensors that the step returned, whole and under the model's own names: also flat
        parameters, views of them, and the gradients of both. Raises as
        ``ParameterNames.of_returned`` does.
        """
        if not self._flat and not any(
            one is not None and is_sharded(one) for one in tensors.values()
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
            read: Callable[[Any], Iterable[Any]] = flat_weights if weights else flat_gradients
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
            give_flat_gradients(handle, [given.get(name) for name, _ in ordered])

    def _weights(self) -> dict[str, Tensor]:
        parameters, places = self._found()
        if not places and not any(map(is_sharded, parameters.values())):
            return {name: one.detach() for name, one in parameters.items()}
        with of_the_suite(), torch.no_grad():
            flat = _of_places(places, flat_weights)
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
        """The parameters of the model first, in its order, as the other ranks have them."""
        known = [name for name in self._names.shapes if name in found]
        return {name: found[name] for name in (*known, *found)}


def is_sharded(tensor: object) -> bool:
    """True for a DTensor. Its class takes long to import."""
    return hasattr(tensor, "full_tensor")


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    kind = getattr(sys.modules.get(OF_SHARDING), "FSDPModule", None)
    return (one for one in model.modules() if kind is not None and isinstance(one, kind))


def _gathered(
    found: Mapping[str, Tensor | None], parameters: Mapping[str, Any], *, sharded: bool = False
) -> dict[str, Tensor | None]:
    """The gradients, whole or still ``sharded``. A rank that lacks its shard of one counts as a
    rank with zeros there, or else those that have it would wait for the rank.
    """
    of_mesh = {name: one for name, one in parameters.items() if is_sharded(one)}
    on_mesh: dict[Any, list[str]] = {}
    for name, parameter in of_mesh.items():
        on_mesh.setdefault(parameter.device_mesh, []).append(name)
    whole = dict(found)
    for mesh, names in on_mesh.items():
        held = [found[name] is not None for name in names]
        device = of_mesh[names[0]].to_local().device
        anywhere = torch.tensor(held, dtype=torch.int32, device=device)
        for group in mesh.get_all_groups():
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        for name, has, somebody_has in zip(names, held, anywhere.tolist(), strict=True):
            if somebody_has:
                one = found[name] if has else torch.zeros_like(of_mesh[name])
                assert one is not None
                whole[name] = one.detach() if sharded else gathered(one.detach())
    return whole


def _by_handle(places: Mapping[str, Place]) -> dict[Any, list[tuple[str, int]]]:
    found: dict[Any, list[tuple[str, int]]] = {}
    for name, place in places.items():
        found.setdefault(place.handle, []).append((name, place.number))
    return found


def _of_places(places: Mapping[str, Place], read: Callable[[Any], Iterable[Any]]) -> dict[str, Any]:
    """The values that ``read`` finds in the flat parameters, under the names of the model."""
    found: dict[str, Any] = {}
    for handle, numbered in _by_handle(places).items():
        values = list(read(handle))
        found |= {name: values[number] for name, number in numbered}
    return found


def _like(whole: Tensor, parameter: Any) -> Tensor:
    """A whole tensor in the dtype of a parameter, and sharded as it is."""
    whole = whole.to(parameter.dtype)
    if not is_sharded(parameter) or is_sharded(whole):
        return whole
    distribute: Any = sys.modules["torch.distributed.tensor"].distribute_tensor
    sharded: Tensor = distribute(
        whole, parameter.device_mesh, parameter.placements, src_data_rank=None
    )
    return sharded


# Sees through FullyShardedDataParallel (FSDP1), which shards parameters inside flat ones.
#
# It puts the parameters of a module one after the other into one flat parameter, of which every
# rank keeps a part. With ``use_orig_params=True`` the model's own parameters become views of that
# part, without it they are gone. The attributes of torch that are read here are not public; this
# is written for torch 2.11 to 2.15. Source: torch/distributed/fsdp/_flat_param.py.

MODULE = "torch.distributed.fsdp._flat_param"

NONE, PART, OWN = 0, 1, 2
"""The gradient of a parameter on one rank: none, a part of the reduced one, or the rank's own."""


def is_flattened(parameter: object) -> bool:
    """True for a flat parameter and for one that has become a view of it."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def is_flat(parameter: Tensor) -> bool:
    """True for a flat parameter itself."""
    return is_flattened(parameter) and hasattr(parameter, "_param_infos")


@dataclass(frozen=True)
class Place:
    """Where a parameter of the model is now: parameter ``number`` of a flat one.

    ``handle``: torch's own, which knows the flat parameter and the group that it is sharded in.
    """

    handle: Any
    number: int

    @property
    def is_elsewhere(self) -> bool:
        """True if other ranks have all of the parameter."""
        info = self.handle.flat_param._shard_param_infos[self.number]
        return bool(self.handle.uses_sharded_strategy and not info.in_shard)

    @property
    def requires_grad(self) -> bool:
        flat = self.handle.flat_param
        return bool((flat if flat._params is None else flat._params[self.number]).requires_grad)


class FlatParameters:
    """The flat parameters that were made inside ``recorded``.

    Nothing in a model leads to the handle of its flat parameter, and a step may drop the wrapper
    that has it, so the handles are kept from the moment when they are made.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._handles)

    @property
    def count(self) -> int:
        """How many of them there are."""
        return len(self._handles)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the flat parameters that are made inside the block."""
        undo: list[Callable[[], None]] = []
        finder = _AfterImport(lambda module: undo.append(self._record(module)))
        if MODULE in sys.modules:
            undo.append(self._record(sys.modules[MODULE]))
        else:
            sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
            for one in undo:
                one()

    def places(self, modules: Mapping[int, str]) -> dict[str, Place]:
        """Where the parameters of these modules are, by their names before they were flattened.

        ``modules``: the id of a module -> the name that it had in the model.
        """
        return {
            ".".join(filter(None, (modules[id(info.module)], info.param_name))): Place(
                handle, number
            )
            for handle in self._handles
            for number, info in enumerate(handle.flat_param._param_infos)
            if id(info.module) in modules
        }

    def holds(self, tensor: Tensor) -> bool:
        """True if this is a view of a flat parameter, or the gradient of one."""
        return any(
            tensor is one or tensor is one.grad
            for handle in self._handles
            for one in handle.flat_param._params or ()
        )

    def opened(self, tensor: Tensor, modules: Mapping[int, str]) -> dict[str, Tensor | None] | None:
        """The parameters inside a flat one, or their gradients, whole and by name; None if the
        tensor is neither a flat parameter nor the gradient of one. ``modules``: as above.
        """
        for handle in self._handles:
            flat = handle.flat_param
            if flat._params is None and (tensor is flat or tensor is flat.grad):
                whole = flat_weights(handle) if tensor is flat else flat_gradients(handle)
                names = [
                    name for name, place in self.places(modules).items() if place.handle is handle
                ]
                return dict(zip(names, whole, strict=True)) if names else None
        return None

    def _record(self, module: ModuleType) -> Callable[[], None]:
        kind: Any = vars(module)["FlatParamHandle"]
        initialise = kind.__init__

        @wraps(initialise)
        def recording(handle: Any, *arguments: Any, **named: Any) -> None:
            initialise(handle, *arguments, **named)
            self._handles.append(handle)

        def undo() -> None:
            kind.__init__ = initialise

        kind.__init__ = recording
        return undo


class _AfterImport:
    """A finder for ``sys.meta_path`` that calls ``then`` with torch's module of flat parameters,
    once it is imported.
    """

    def __init__(self, then: Callable[[ModuleType], object]) -> None:
        self._then = then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        spec = spec_of_finders_after(self, name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                loader.exec_module = load  # that of another finder, which takes it away itself
                load(module)
                self._then(module)

            loader.exec_module = exec_module
        return spec


def flat_weights(handle: Any) -> list[Tensor]:
    """All parameters of a flat one, whole. All ranks of its group must call this."""
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", flat).detach()
    return _cut(flat, _all_of(handle, shard))


def flat_gradients(handle: Any, instead: Mapping[int, Tensor] | None = None) -> list[Tensor | None]:
    """The gradients of all parameters of a flat one, whole; None where no rank has any.
    ``instead``: id of a gradient -> what to take for it.

    All ranks of its group must call this. A gradient that was not reduced, as ``no_sync`` leaves
    it, is the rank's own. A rank that lacks its part of a gradient has zeros there.
    """
    flat = handle.flat_param
    held = _held(handle, instead or {})
    kinds = torch.tensor([kind for kind, _ in held], device=handle.device)
    if not handle.uses_sharded_strategy:
        return [None if one is None else one.detach() for _, one in held]
    parts = (kinds == PART).int()
    dist.all_reduce(parts, op=dist.ReduceOp.MAX, group=handle.process_group)
    whole: Sequence[Tensor] = ()
    if bool(parts.any()):
        shard = torch.zeros(flat._sharded_size, dtype=flat.dtype, device=handle.device)
        for (kind, one), info in zip(held, flat._shard_param_infos, strict=True):
            if kind == PART and one is not None and info.in_shard:
                end = info.offset_in_shard + info.numel_in_shard
                shard[info.offset_in_shard : end] = one.detach().reshape(-1)
        whole = _cut(flat, _all_of(handle, shard))
    found: list[Tensor | None] = []
    for number, (kind, own) in enumerate(held):
        if kind == OWN and own is not None:
            found.append(own.detach())
        else:
            found.append(whole[number] if bool(parts[number]) else None)
    return found


def flat_gradient(place: Place) -> Tensor | None:
    """The tensor that holds the gradient of a parameter inside a flat one, or this rank's part."""
    flat = place.handle.flat_param
    gradient: Tensor | None = (flat if flat._params is None else flat._params[place.number]).grad
    return gradient


def part_in_shard(place: Place) -> tuple[Tensor, slice | None] | None:
    """The gradient of a parameter inside a flat one as it is on this rank, and which of its
    flattened elements it has; None for all. None if there is no gradient here.
    """
    kind, held = _held_of(place)
    info = place.handle.flat_param._shard_param_infos[place.number]
    if held is None or (kind == PART and not info.in_shard):
        return None
    if kind == OWN:
        return held.detach(), None
    return held.detach(), slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)


def _held_of(place: Place) -> tuple[int, Tensor | None]:
    """The same as in ``_held``, of one parameter."""
    flat = place.handle.flat_param
    if flat._params is None:
        return _held(place.handle, {})[place.number]
    gradient = flat._params[place.number].grad
    return (NONE if gradient is None else _kind_of(place.handle)), gradient


def give_flat_gradients(handle: Any, given: Sequence[Tensor | None]) -> None:
    """Put whole gradients where an optimizer finds them: each rank keeps its part."""
    flat, device = handle.flat_param, handle.device
    if all(one is None for one in given):
        for parameter in (flat, *(flat._params or ())):
            parameter.grad = None
        return
    pieces, left = [], iter(zip(given, flat._shapes, strict=True))
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        one, _ = (None, None) if is_padding else next(left)
        zeros = torch.zeros(size, dtype=flat.dtype, device=device)
        pieces.append(zeros if one is None else one.detach().to(flat.dtype).reshape(-1))
    whole = torch.cat(pieces)
    size = int(flat._sharded_size.numel())
    shard = whole
    if handle.uses_sharded_strategy:
        padded = torch.zeros(size * handle.world_size, dtype=flat.dtype, device=device)
        padded[: whole.numel()] = whole
        shard = padded[size * handle.rank : size * (handle.rank + 1)].clone()
    flat.grad = shard.to(flat.device)
    for parameter, one, info in zip(
        flat._params or (), given, flat._shard_param_infos, strict=bool(flat._params)
    ):
        begin = info.offset_in_shard
        has_part = one is not None and info.in_shard
        parameter.grad = (
            flat.grad[begin : begin + info.numel_in_shard].reshape(parameter.shape)
            if has_part
            else None
        )


def _held(handle: Any, instead: Mapping[int, Tensor]) -> list[tuple[int, Tensor | None]]:
    """This rank's part of the gradient of each parameter of a flat one, and its kind."""
    flat, kind = handle.flat_param, _kind_of(handle)
    if flat._params is not None:
        gradients = [instead.get(id(p.grad), p.grad) for p in flat._params]
        return [(NONE if one is None else kind, one) for one in gradients]
    if flat.grad is None:
        return [(NONE, None)] * flat._num_params
    gradient = instead.get(id(flat.grad), flat.grad)
    if kind == OWN:
        return [(OWN, one) for one in _cut(flat, gradient.detach())]
    return [
        (PART, gradient[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard])
        if info.in_shard
        else (NONE, None)
        for info in flat._shard_param_infos
    ]


def _kind_of(handle: Any) -> int:
    """The kind of the gradients in a flat parameter on this rank, where there are any."""
    flat = handle.flat_param
    is_part = flat.grad is None or flat.grad.numel() == int(flat._sharded_size.numel())
    return PART if handle.uses_sharded_strategy and is_part else OWN


def _all_of(handle: Any, shard: Tensor) -> Tensor:
    """The flat parameter, or its gradient, from the shards of all ranks of its group."""
    if not handle.uses_sharded_strategy:
        return shard.clone()
    shard = shard.to(handle.device).contiguous()
    gathered = [torch.empty_like(shard) for _ in range(handle.world_size)]
    dist.all_gather(gathered, shard, group=handle.process_group)
    return torch.cat(gathered)


def _cut(flat: Any, whole: Tensor) -> list[Tensor]:
    """The parameters inside a flat one, or their gradients, each in its own shape."""
    sizes = list(flat._numels_with_padding)
    pieces = whole[: sum(sizes)].split(sizes)
    own = (one for one, pad in zip(pieces, flat._is_padding_mask, strict=True) if not pad)
    return [
        piece.view(shape) if contiguous else piece.as_strided(shape, stride)
        for piece, shape, stride, contiguous in zip(
            own, flat._shapes, flat._strides, flat._contiguities, strict=True
        )
    ]


def original_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters of a model, without flat ones."""
    return ((name, one) for name, one in model.named_parameters() if not is_flat(one))


# Reads which parameters a wrapper of torch is given, and among which ranks it reduces them.

OF_SHARDING, OF_MESHES = "torch.distributed.fsdp", "torch.distributed.device_mesh"
"""The parts of torch that shard parameters, and that make meshes; they take long to import."""

IGNORED = ("ignored_params", "ignored_parameters", "ignored_states", "ignored_modules")
"""The arguments of ``fully_shard`` and ``FullyShardedDataParallel`` with what to leave alone."""


def sharding_functions() -> tuple[Any, ...]:
    """The functions that shard the parameters of a module, if anybody has imported them."""
    module = sys.modules.get(OF_SHARDING)
    if module is None:
        return ()
    return (module.fully_shard, module.FullyShardedDataParallel.__init__)


def divide_factor_functions() -> tuple[Any, ...]:
    """The methods that set the number by which FSDP divides gradients, if anybody imported them.

    Each sets it for one module, and not for those inside that were sharded by themselves.
    """
    module = sys.modules.get(OF_SHARDING)
    if module is None:
        return ()
    return (module.FSDPModule.set_gradient_divide_factor,)


def hook_functions() -> tuple[Any, ...]:
    """The method that gives FSDP1 a communication hook, if anybody has imported it."""
    module = sys.modules.get(OF_SHARDING)
    return () if module is None else (module.FullyShardedDataParallel.register_comm_hook,)


def replicating_functions() -> tuple[Any, ...]:
    """The function that gives a module the hooks of DDP, if anybody has imported it."""
    module = sys.modules.get("torch.distributed._composable.replicate")
    return () if module is None else (module.replicate,)


def synchronisation_functions() -> tuple[Any, ...]:
    """The methods that tell FSDP whether to reduce gradients, if anybody has imported them."""
    module = sys.modules.get(OF_SHARDING)
    return () if module is None else (module.FSDPModule.set_requires_gradient_sync,)


def reduce_dtype_among(arguments: Mapping[str, Any]) -> str:
    """The type in which FSDP is told to reduce, such as ``bfloat16``; "" if it is not told any, or
    none that is narrower than that in which it computes.
    """
    policy = arguments.get("mp_policy", arguments.get("mixed_precision"))
    dtype, of_weights = (getattr(policy, one, None) for one in ("reduce_dtype", "param_dtype"))
    if not isinstance(dtype, torch.dtype):
        return ""
    of_weights = of_weights if isinstance(of_weights, torch.dtype) else torch.float64
    is_narrower = torch.finfo(dtype).eps > torch.finfo(of_weights).eps
    return str(dtype).removeprefix("torch.") if is_narrower else ""


def parameters_of(
    module: nn.Module, names: Mapping[int, str], ignored: Collection[int] = ()
) -> tuple[str, ...]:
    """The names of a module's parameters that are still as the model was built.

    Those that were sharded before are other objects, and may have got the place in memory of
    others. ``names``: id of a parameter -> its name. ``ignored``: the ids of those to leave out.
    """
    plain = [one for one in module.parameters() if type(one) is nn.Parameter]
    ids = (id(one) for one in plain if id(one) not in ignored)
    return tuple(names[one] for one in ids if one in names)


def ignored_among(arguments: Mapping[str, Any]) -> set[int]:
    """The ids of the parameters that a wrapper is told to ignore, among its arguments."""
    found: set[int] = set()
    for name in IGNORED:
        given = arguments.get(name)
        for one in given if isinstance(given, list | tuple | set | frozenset) else ():
            found |= {id(p) for p in one.parameters()} if isinstance(one, nn.Module) else {id(one)}
    return found


def ranks_of(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks of the mesh or group among these arguments of a wrapper; () if not known."""
    mesh = arguments.get("mesh", arguments.get("device_mesh"))
    group = arguments.get("process_group")
    try:
        if mesh is not None and isinstance(mesh, sys.modules[OF_MESHES].DeviceMesh):
            return tuple(sorted(map(int, mesh.mesh.flatten().tolist())))
        if isinstance(group, dist.ProcessGroup):
            return tuple(sorted(dist.get_process_group_ranks(group)))
        return tuple(range(dist.get_world_size())) if mesh is None and group is None else ()
    except (RuntimeError, ValueError, TypeError):
        return ()
