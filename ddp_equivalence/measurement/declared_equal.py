"""Notices which tensors a step declares to be equal on several ranks, and what each rank has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine, Kind, is_shown, lines_of
from ddp_equivalence.measurement.lines import Handler, code_of

# ``DTensor.from_local`` believes its caller that a tensor is replicated, and ``to_local`` believes
# the same of the gradient that comes back, unless it is given ``grad_placements``. Neither compares
# the ranks. What ``to_local`` returns of a tensor that is Partial is no whole either, although it
# has the shape of one. Source: pytorch.org/docs/stable/distributed.tensor.html.

OF_DTENSORS = "torch.distributed.tensor._api"
"""The module of torch that has both functions. It is not public, and takes long to import."""

Lines = tuple[CodeLine | None, CodeLine | None]


class DeclaredEqual:
    """``append(kind, lines, ...)`` adds a call to those of the step, whose value is the norm of a
    tensor on this rank, and whose ranks are those on which it is declared to be equal.
    """

    def __init__(self, append: Callable[..., None]) -> None:
        self._append = append

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that believe the step, if anybody has imported them."""
        module: Any = sys.modules.get(OF_DTENSORS)
        if not hasattr(module, "_ToTorchTensor") or not hasattr(module, "_FromTorchTensor"):
            return {}
        return {
            code_of(module._FromTorchTensor.forward): self._from_local,
            code_of(module.DTensor.to_local): self._part,
            code_of(module._ToTorchTensor.forward): self._to_local,
            code_of(module._ToTorchTensor.backward): self._gradient,
        }

    def _from_local(self, frame: FrameType) -> None:
        given = frame.f_locals
        if torch._C._current_graph_task_id() == -1 and not given["run_check"]:
            is_copy = [one.is_replicate() for one in given["placements"]]
            self._note("from_local", lines_of(frame), given["input"], given["device_mesh"], is_copy)

    def _part(self, frame: FrameType) -> None:
        tensor: Any = frame.f_locals["self"]
        caller = frame.f_back
        if caller is not None and is_shown(caller.f_code.co_filename):
            is_part = [one.is_partial() for one in tensor.placements]
            lines = lines_of(frame)
            self._note("Partial", lines, tensor._local_tensor, tensor.device_mesh, is_part)

    def _to_local(self, frame: FrameType) -> None:
        frame.f_locals["ctx"].called_at = lines_of(frame)

    def _gradient(self, frame: FrameType) -> None:
        ctx, gradient = frame.f_locals["ctx"], frame.f_locals["grad_output"]
        if ctx.grad_placements is None and gradient is not None:
            is_copy = [one.is_replicate() for one in ctx.dtensor_spec.placements]
            self._note("to_local", ctx.called_at, gradient, ctx.dtensor_spec.mesh, is_copy)

    def _note(
        self, what: str, lines: Lines, tensor: Tensor, mesh: Any, in_dims: Sequence[bool]
    ) -> None:
        """``in_dims``: for each dimension of the mesh, whether the ranks along it are meant."""
        groups = [mesh.get_group(dim) for dim, is_meant in enumerate(in_dims) if is_meant]
        groups = [one for one in groups if one.size() > 1]
        if groups and tensor.numel() > 1:  # a number may be there for a log
            with torch.no_grad():
                norm = float(tensor.detach().to(torch.float64).norm())
            dtype = str(tensor.dtype).removeprefix("torch.")
            for group in groups:
                ranks = tuple(dist.get_process_group_ranks(group))
                self._append(Kind.EQUAL, lines, what=what, value=norm, ranks=ranks, dtype=dtype)
