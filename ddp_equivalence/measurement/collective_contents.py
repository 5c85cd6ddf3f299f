"""Says what the tensors of a collective are: gradients, parameters, copies of these, or neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddp_equivalence.measurement.calls import CollectiveCall, Contents
from ddp_equivalence.measurement.gradient_watch import SAME_FACTOR, matching_segments
from ddp_equivalence.measurement.parts_of_gradients import parts_of
from ddp_equivalence.measurement.plain_tensors import NotPlain, plain
from ddp_equivalence.ranks.issued_collectives import Issued

MOST_ELEMENTS = 20_000_000
"""Larger tensors are not compared with gradients and parameters."""

Found = tuple[Contents, tuple[str, ...], float]
"""What the tensors are, of which parameters, and how many times that."""


def collective_call(
    issued: Issued,
    gradients: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> CollectiveCall:
    """What is recorded of a collective. The rest: as in ``contents_of``."""
    contents, names, factor = contents_of(issued.tensors, gradients, parameters, buffers)
    return CollectiveCall(
        op=issued.op,
        reduce_op=issued.reduce_op,
        ranks=issued.ranks,
        elements=sum(one.numel() for one in issued.tensors if one.is_floating_point()),
        contents=contents,
        names=names,
        factor=factor,
        asynchronous=issued.asynchronous,
        dtype=dtype_of(issued.tensors),
        parts_of=parts_of(issued, gradients) if contents is Contents.OTHER else (),
        loses_gradient=torch.is_grad_enabled()
        and any(one.requires_grad and not one.is_leaf for one in issued.tensors),
    )


def contents_of(
    tensors: Sequence[Tensor],
    gradients: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> Found:
    """What these tensors are. ``gradients``, ``parameters``, ``buffers``: those of the model."""
    try:
        flat = [plain(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    except NotPlain:
        return Contents.OTHER, (), 1.0
    in_place: tuple[tuple[Contents, Mapping[str, Tensor]], ...] = (
        (Contents.GRADIENTS, gradients),
        (Contents.PARAMETERS, parameters),
        (Contents.BUFFERS, buffers),
    )
    for contents, named in in_place:
        names = _sharing_memory(flat, named)
        if names:
            return contents, names, 1.0
    if sum(tensor.numel() for tensor in flat) > MOST_ELEMENTS:
        return Contents.OTHER, (), 1.0
    copies: tuple[tuple[Contents, Mapping[str, Tensor]], ...] = (
        (Contents.COPIES_OF_GRADIENTS, gradients),
        (Contents.COPIES_OF_PARAMETERS, parameters),
    )
    for contents, named in copies:
        names, factor = _copied(flat, named)
        if names:
            return contents, names, factor
    return Contents.OTHER, (), 1.0


def dtype_of(tensors: Sequence[Tensor]) -> str:
    """The type of the first tensor of floating-point numbers; "" if there is none."""
    dtypes = [str(one.dtype) for one in tensors if one.is_floating_point()]
    return dtypes[0].removeprefix("torch.") if dtypes else ""


def _sharing_memory(tensors: Sequence[Tensor], named: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of those that lie in the same memory as one of the tensors."""
    ranges = [_range(tensor) for tensor in tensors if tensor.numel()]
    found = []
    for name, tensor in named.items():
        try:
            begin, end = _range(plain(tensor.detach()))
        except NotPlain:
            continue
        if any(begin < other_end and other_begin < end for other_begin, other_end in ranges):
            found.append(name)
    return tuple(found)


def _range(tensor: Tensor) -> tuple[int, int]:
    """Where the tensor begins and ends in memory; an empty range for one without memory."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return 0, 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _copied(
    tensors: Sequence[Tensor], named: Mapping[str, Tensor]
) -> tuple[tuple[str, ...], float]:
    """The names of those that the tensors are copies of, and the factor that all copies have."""
    values = {}
    for name, tensor in named.items():
        try:
            values[name] = plain(tensor.detach()).to("cpu").reshape(-1).double()
        except (NotPlain, RuntimeError):
            continue
    names: list[str] = []
    factors: list[float] = []
    same = SAME_FACTOR
    for tensor in tensors:
        flat = tensor.detach().to("cpu").reshape(-1).double()
        same = max(same, torch.finfo(tensor.dtype).eps)  # a narrower type has rounded them
        for name, factor in matching_segments(flat, values, same):
            names.append(name)
            factors.append(factor)
            del values[name]
    if not names or max(factors) - min(factors) > same * abs(max(factors, key=abs)):
        return tuple(names), 1.0
    return tuple(names), factors[0]
