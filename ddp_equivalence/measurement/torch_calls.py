"""Records calls of torch's own functions: clipping, clearing, optimizers, groups, seeds, scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grads_with_norm_

from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.code_lines import beginning_of, callers_of, is_shown, lines_of
from ddp_equivalence.measurement.hook_states import (
    attributes_of,
    owner_of_numbers,
    state_of_hook,
)
from ddp_equivalence.measurement.line_tracer import Handler, code_of
from ddp_equivalence.measurement.sharding import (
    divide_factor_functions,
    ignored_among,
    parameters_of,
    ranks_of,
    sharding_functions,
)

REGISTERING = (
    DistributedDataParallel.register_comm_hook,
    DistributedDataParallel._register_builtin_comm_hook,
)
"""The functions that give DDP a communication hook. A planted fault may replace them later."""


POINT_TO_POINT = (dist.send, dist.recv, dist.isend, dist.irecv)
"""The functions by which one rank sends a tensor to another one."""

_POINT_TO_POINT_CODES = frozenset(map(code_of, POINT_TO_POINT))


CLIPS_WITH_NORM = clip_grads_with_norm_
"""``clip_grad_norm_`` calls it as well, with the norm that it has found.

Source: torch 2.11 and 2.13, torch/nn/utils/clip_grad.py.
"""


class TorchCalls:
    """``record(kind, frame, ...)`` adds a call to those of the step. ``names``: id of a parameter
    -> its name.
    """

    def __init__(self, record: Callable[..., None], names: Mapping[int, str]) -> None:
        self._record = record
        self._names = names

    def handlers(self) -> dict[CodeType, Handler]:
        """The functions of torch that are recorded when they are called."""
        functions: dict[Any, Handler] = {
            CLIPS_WITH_NORM: self._on_clip_by_norm,
            clip_grad.clip_grad_value_: self._on_clip_by_value,
            nn.Module.zero_grad: self._on_zero_grad,
            torch.optim.Optimizer.zero_grad: self._on_zero_grad,
            DistributedDataParallel.no_sync: self._on_no_sync,
            dist.new_group: self._on_new_group,
            torch.random.manual_seed: self._on_seed,
            torch.amp.GradScaler.scale: lambda frame: self._on_scale(Kind.SCALE, frame),
            torch.amp.GradScaler.unscale_: lambda frame: self._on_scale(Kind.UNSCALE, frame),
        }
        seeds_of_gpus = torch.cuda.manual_seed, torch.cuda.manual_seed_all
        functions |= dict.fromkeys(seeds_of_gpus, self._on_seed_of_gpus)
        functions |= dict.fromkeys(REGISTERING, self._on_hook)
        functions |= dict.fromkeys(sharding_functions(), self._on_sharding)
        functions |= dict.fromkeys(divide_factor_functions(), self._on_divide_factor)
        functions |= dict.fromkeys(POINT_TO_POINT, self._on_point_to_point)
        for name in dir(torch.optim):
            kind = getattr(torch.optim, name)
            if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
                functions[kind.step] = self._on_optimizer_step
        return {code_of(function): handler for function, handler in functions.items()}

    def _on_clip_by_norm(self, frame: FrameType) -> None:
        most, norm = frame.f_locals["max_norm"], frame.f_locals["total_norm"]
        if type(norm) is Tensor:  # a sharded one is not: its ranks would have to add it up
            norm = float(norm)
        self._on_clip(frame, most, norm if isinstance(norm, float) else None, _clipping(frame))

    def _on_clip_by_value(self, frame: FrameType) -> None:
        self._on_clip(frame, frame.f_locals["clip_value"], None, frame.f_code.co_name)

    def _on_clip(self, frame: FrameType, most: Any, norm: float | None, what: str) -> None:
        parameters = frame.f_locals["parameters"]
        if isinstance(parameters, Sequence) and not parameters:
            return  # nothing is clipped
        names, way = self._names_of(parameters), callers_of(frame)
        self._record(
            Kind.CLIP, frame, value=float(most), norm=norm, what=what, names=names, callers=way
        )

    def _on_zero_grad(self, frame: FrameType) -> None:
        owner = frame.f_locals["self"]
        if isinstance(owner, nn.Module):
            parameters: Any = list(owner.parameters())
        else:
            parameters = _of_optimizer(owner)
        if lines_of(frame)[0] is not None:  # the suite clears gradients itself, before each step
            names, way = self._names_of(parameters), callers_of(frame)
            self._record(Kind.ZERO_GRAD, frame, names=names, callers=way)

    def _on_optimizer_step(self, frame: FrameType) -> None:
        optimizer = frame.f_locals["self"]
        self._record(
            Kind.OPTIMIZER_STEP,
            frame,
            what=type(optimizer).__name__,
            names=self._names_of(_of_optimizer(optimizer)),
        )

    def _on_new_group(self, frame: FrameType) -> None:
        given = frame.f_locals.get("ranks")
        ranks = range(dist.get_world_size()) if given is None else given
        ranks = tuple(map(int, ranks))
        self._record(Kind.NEW_GROUP, frame, ranks=ranks, callers=callers_of(frame))

    def _on_no_sync(self, frame: FrameType) -> None:
        if len(frame.f_locals) == 1:  # later the generator goes on, with more variables
            self._record(Kind.NO_SYNC, frame.f_back, callers=callers_of(frame))

    def _on_point_to_point(self, frame: FrameType) -> None:
        outer = frame.f_back
        while outer is not None and not is_shown(outer.f_code.co_filename):
            if outer.f_code in _POINT_TO_POINT_CODES:
                return  # recv calls irecv
            outer = outer.f_back
        self._record(
            Kind.POINT_TO_POINT, frame, what=frame.f_code.co_name, callers=callers_of(frame)
        )

    def _on_seed(self, frame: FrameType) -> None:
        self._record(Kind.SEED, frame, value=float(int(frame.f_locals["seed"])))

    def _on_seed_of_gpus(self, frame: FrameType) -> None:
        caller = frame.f_back  # torch.manual_seed seeds the GPUs, too, and so does this package
        if caller is not None and is_shown(caller.f_code.co_filename):
            self._on_seed(frame)

    def _on_hook(self, frame: FrameType) -> None:
        hook = frame.f_locals.get("hook", frame.f_locals.get("comm_hook_type"))
        self._record(Kind.HOOK, frame, **facts_of_hook(hook, frame.f_locals.get("state")))

    def _on_sharding(self, frame: FrameType) -> None:
        module = frame.f_locals.get("module")
        if isinstance(module, nn.Module):
            name = frame.f_code.co_name
            self._record(
                Kind.SHARDING,
                frame,
                what="FullyShardedDataParallel" if name == "__init__" else name,
                names=parameters_of(module, self._names, ignored_among(frame.f_locals)),
                ranks=ranks_of(frame.f_locals),
            )

    def _on_divide_factor(self, frame: FrameType) -> None:
        value = float(frame.f_locals["factor"])
        self._record(Kind.DIVIDE_FACTOR, frame, value=value, what=frame.f_code.co_name)

    def _on_scale(self, kind: Kind, frame: FrameType) -> None:
        scaler = frame.f_locals["self"]
        self._record(kind, frame, value=float(scaler.get_scale()))

    def _names_of(self, parameters: Any) -> tuple[str, ...]:
        """The names of the model's parameters among these. An iterator is left as it is."""
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        if isinstance(parameters, nn.Module):
            parameters = list(parameters.parameters())
        if not isinstance(parameters, Sequence):
            return ()
        return tuple(self._names[id(one)] for one in parameters if id(one) in self._names)


def _clipping(frame: FrameType) -> str:
    """The public function that clips by the norm: this frame's own, or the one that called it."""
    outer: FrameType | None = frame
    while outer is not None and not is_shown(outer.f_code.co_filename):
        if outer.f_code.co_name == "clip_grad_norm_":
            return "clip_grad_norm_"
        outer = outer.f_back
    return "clip_grads_with_norm_"


def facts_of_hook(hook: Any, state: object) -> dict[str, Any]:
    """What is recorded of a communication hook, as the fields of a ``Call``."""
    return {
        "what": getattr(hook, "__name__", str(hook)),
        "made_at": beginning_of(hook),
        "numbers": _numbers_of(owner_of_numbers(hook, state)),
        "hook_state": state_of_hook(hook, state),
    }


def _of_optimizer(optimizer: Any) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _numbers_of(state: object) -> tuple[tuple[str, float], ...]:
    """The attributes of an object that are plain numbers."""
    return tuple(
        (name, float(value))
        for name, value in attributes_of(state).items()
        if type(value) in (int, float)
    )
