"""Reads which parameters a wrapper of torch is given, and among which ranks it reduces them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

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
