"""Reads which parameters a wrapper of torch is given, and among which ranks it reduces them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

OF_SHARDING, OF_MESHES = "torch.distributed.fsdp", "torch.distributed.device_mesh"
"""The parts of torch that shard parameters, and that make meshes; they take long to import."""


def sharding_functions() -> tuple[Any, ...]:
    """The functions that shard the parameters of a module, if anybody has imported them."""
    module = sys.modules.get(OF_SHARDING)
    if module is None:
        return ()
    return (module.fully_shard, module.FullyShardedDataParallel.__init__)


def parameters_of(module: nn.Module, names: Mapping[int, str]) -> tuple[str, ...]:
    """The names of a module's parameters that are still as the model was built.

    Those that were sharded before are other objects, and may have got the place in memory of
    others. ``names``: id of a parameter -> its name.
    """
    plain = [one for one in module.parameters() if type(one) is nn.Parameter]
    return tuple(names[id(one)] for one in plain if id(one) in names)


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
