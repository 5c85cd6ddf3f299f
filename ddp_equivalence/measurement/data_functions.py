"""The functions of torch that say which examples a rank gets, or what DDP does with gradients."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_equivalence.measurement.calls import CodeLine, Kind
from ddp_equivalence.measurement.code_lines import beginning_of

Described = tuple[Kind, str, float]
"""The kind of the call, the call as text, and a number that it is about."""


def _sampler(frame: FrameType) -> Described:
    """The number is the length of the data set."""
    values = frame.f_locals
    count, rank = values.get("num_replicas"), values.get("rank")
    shown = (
        f"num_replicas={dist.get_world_size() if count is None else count}, "
        f"rank={dist.get_rank() if rank is None else int(rank)}, "
        f"shuffle={values.get('shuffle')}, drop_last={values.get('drop_last')}"
    )
    return Kind.SAMPLER, f"{_class_of(values)}({shown})", _length(values.get("dataset"))


def _loader(frame: FrameType) -> Described:
    """The number is the length of the data set."""
    values = frame.f_locals
    shown = [f"batch_size={values.get('batch_size')}"]
    if values.get("sampler") is not None:
        shown.append(f"sampler={type(values['sampler']).__name__}")
    if values.get("batch_sampler") is not None:
        shown = [f"batch_sampler={type(values['batch_sampler']).__name__}"]
    shown += [f"{name}=True" for name in ("shuffle", "drop_last") if values.get(name)]
    text = f"{_class_of(values)}({', '.join(shown)})"
    return Kind.LOADER, text, _length(values.get("dataset"))


def own_sampler(frame: FrameType) -> CodeLine | None:
    """Where a class of the user's, which gives a loader its order, begins to do so."""
    for name in ("sampler", "batch_sampler"):
        sampler = frame.f_locals.get(name)
        line = beginning_of(getattr(type(sampler), "__iter__", None))
        if line is not None:
            return line
    return None


def own_length(frame: FrameType) -> CodeLine | None:
    """Where a data set of the user's class, which a loader was given, says how long it is."""
    return beginning_of(getattr(type(frame.f_locals.get("dataset")), "__len__", None))


def _ignoring(frame: FrameType) -> Described:
    """The number is how many parameters and buffers DDP is to ignore."""
    names = frame.f_locals.get("params_and_buffers_to_ignore", ())
    return Kind.IGNORE, "_set_params_and_buffers_to_ignore_for_model", _length(names)


def _class_of(values: dict[str, Any]) -> str:
    return type(values["self"]).__name__


def _length(data: Any) -> float:
    try:
        return float(len(data))
    except TypeError:  # a data set that is only iterated
        return 0.0


DATA_FUNCTIONS: dict[CodeType, Callable[[FrameType], Described]] = {
    DistributedSampler.__init__.__code__: _sampler,
    DataLoader.__init__.__code__: _loader,
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model.__code__: _ignoring,
}
