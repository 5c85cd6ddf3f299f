"""Sees through FullyShardedDataParallel (FSDP1), which shards parameters inside flat ones.

It puts the parameters of a module one after the other into one flat parameter, of which every rank
keeps a part. With ``use_orig_params=True`` the model's own parameters become views of that part,
without it they are gone. The attributes of torch that are read here are not public; this is written
for torch 2.11 to 2.15.
Source: torch/distributed/fsdp/_flat_param.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_equivalence.ranks.user_modules.import_watch import spec_of_finders_after

MODULE = "torch.distributed.fsdp._flat_param"

NONE, PART, OWN = 0, 1, 2
"""The gradient of a parameter on one rank: none, a part of the reduced one, or the rank's own."""


def is_flattened(parameter: Tensor) -> bool:
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
                whole = weights(handle) if tensor is flat else gradients(handle)
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


def weights(handle: Any) -> list[Tensor]:
    """All parameters of a flat one, whole. All ranks of its group must call this."""
    flat = handle.flat_param
    shard = getattr(flat, "_local_shard", flat).detach()
    return _cut(flat, _all_of(handle, shard))


def gradients(handle: Any) -> list[Tensor | None]:
    """The gradients of all parameters of a flat one, whole; None where no rank has any.

    All ranks of its group must call this. A gradient that was not reduced, as ``no_sync`` leaves
    it, is the rank's own. A rank that lacks its part of a gradient has zeros there.
    """
    flat = handle.flat_param
    held = _held(handle)
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


def give_gradients(handle: Any, given: Sequence[Tensor | None]) -> None:
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


def _held(handle: Any) -> list[tuple[int, Tensor | None]]:
    """What this rank has of the gradient of each parameter of a flat one, and its kind."""
    flat = handle.flat_param
    size = int(flat._sharded_size.numel())
    sharded = flat.grad is None or flat.grad.numel() == size
    kind = PART if handle.uses_sharded_strategy and sharded else OWN
    if flat._params is not None:
        return [(NONE if p.grad is None else kind, p.grad) for p in flat._params]
    if flat.grad is None:
        return [(NONE, None)] * flat._num_params
    if kind == OWN:
        return [(OWN, one) for one in _cut(flat, flat.grad.detach())]
    return [
        (PART, flat.grad[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard])
        if info.in_shard
        else (NONE, None)
        for info in flat._shard_param_infos
    ]


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
