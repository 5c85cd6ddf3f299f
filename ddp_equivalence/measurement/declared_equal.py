"""Notices which tensors a step declares to be equal on several ranks, and what each rank has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_equivalence.measurement.calls import CodeLine, Kind, lines_of
from ddp_equivalence.measurement.lines import Handler, code_of

# ``DTensor.from_local`` believes its caller that a tensor is replicated, and ``to_local`` believes
# the same of the gradient that comes back, unless it is given ``grad_placements``. Neither compares
# the ranks. Source: pytorch.org/docs/stable/distributed.tensor.html.

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
        module = sys.modules.get(OF_DTENSORS)
        if not hasattr(module, "_ToTorchTensor") or not hasattr(module, "_FromTorchTensor"):
            return {}
        return {
            code_of(module._FromTorchTensor.forward): self._from_local,
            code_of(module._ToTorchTensor.forward): self._to_local,
            code_of(module._ToTorchTensor.backward): self._gradient,
        }

    def _from_local(self, frame: FrameType) -> None:
        given = frame.f_locals
        if torch._C._current_graph_task_id() == -1 and not given["run_check"]:
            mesh, placements = given["device_mesh"], given["placements"]
            self._note("from_local", lines_of(frame), given["input"], mesh, placements)

    def _to_local(self, frame: FrameType) -> None:
        frame.f_locals["ctx"].called_at = lines_of(frame)

    def _gradient(self, frame: FrameType) -> None:
        ctx, gradient = frame.f_locals["ctx"], frame.f_locals["grad_output"]
        if ctx.grad_placements is None and gradient is not None:
            spec = ctx.dtensor_spec
            self._note("to_local", ctx.called_at, gradient, spec.mesh, spec.placements)

    def _note(
        self, what: str, lines: Lines, tensor: Tensor, mesh: Any, placements: tuple[Any, ...]
    ) -> None:
        with torch.no_grad():
            norm = float(tensor.detach().to(torch.float64).norm())
        dtype = str(tensor.dtype).removeprefix("torch.")
        for dim, placement in enumerate(placements):
            if placement.is_replicate() and mesh.size(dim) > 1:
                ranks = tuple(dist.get_process_group_ranks(mesh.get_group(dim)))
                self._append(Kind.EQUAL, lines, what=what, value=norm, ranks=ranks, dtype=dtype)
