"""Sorts what was done to gradients: by hooks in a backward pass, and by one line after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.measurement.calls import (
    Call,
    CodeLine,
    CollectiveCall,
    Contents,
    GradientChange,
    NotPlain,
    plain,
    thinned,
)
from ddp_equivalence.measurement.gradient_watch import (
    SAME_FACTOR,
    GradientWatch,
    factor_between,
    matching_segments,
)
from ddp_equivalence.ranks.collectives import Issued


def changed_by_hooks(
    gradients: GradientWatch, own: Mapping[str, Tensor], seen: Sequence[Call] = ()
) -> Iterator[GradientChange]:
    """The changes that hooks have made to gradients that backward computed and nobody reduced.

    ``seen``: the calls during this backward; what a line was seen to do is left out.
    """
    known = {name for one in seen if one.change is not None for name in one.change.names}
    changed: dict[float | None, list[str]] = {}
    for name, gradient in own.items():
        if name in known:
            continue
        before, now = gradients.value_before(name), gradients.value_now(name)
        if now is None or now.values.shape != gradient.shape:
            continue
        added = now.values
        if before is not None and before.same_places(now):
            added = now.values - before.values
        if not bool(gradient.any()) and not bool(added.any()):
            continue
        factor = factor_between(gradient, added)
        if factor is None or abs(factor - 1) > SAME_FACTOR:
            changed.setdefault(factor and in_order(factor), []).append(name)
    for factor, names in changed.items():
        yield GradientChange(tuple(names), factor)


def merged(last: Call | None, line: CodeLine | None, change: GradientChange) -> bool:
    """True if the last call is a change that the same line has made, to other parameters."""
    if last is None or last.change is None or last.line != line:
        return False
    is_alike = replace(last.change, names=change.names) == change
    return is_alike and not set(last.change.names) & set(change.names)


# Says what the tensors of a collective are: gradients, parameters, copies of these, or neither.

MOST_ELEMENTS = 20_000_000
"""Larger tensors are not compared with gradients and parameters."""

Found = tuple[Contents, tuple[str, ...], float]
"""The kind of the tensors, of which parameters, and how many times that."""


def collective_call(
    issued: Issued,
    gradients: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
) -> CollectiveCall:
    """The record of a collective. The rest: as in ``contents_of``."""
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
    """The kind of these tensors. ``gradients``, ``parameters``, ``buffers``: those of the model."""
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
            values[name] = plain(tensor.detach()).reshape(-1)
        except (NotPlain, RuntimeError):
            continue
    names: list[str] = []
    factors: list[float] = []
    same = SAME_FACTOR
    for tensor in tensors:
        flat = plain(tensor.detach()).reshape(-1)
        same = max(same, torch.finfo(tensor.dtype).eps)  # a narrower type has rounded them
        for name, factor in matching_segments(flat, values, same):
            names.append(name)
            factors.append(factor)
            del values[name]
    if not names or max(factors) - min(factors) > same * abs(max(factors, key=abs)):
        return tuple(names), 1.0
    return tuple(names), factors[0]


# Recognises a tensor whose elements were picked from gradients, such as some rows of one.

FEWEST = 4
"""So many different numbers that are not zero must be found in the gradients."""

MOST_KEPT = 128
"""So many elements of a tensor are looked for, at equal distances."""

MOST_ELEMENTS_SEARCHED = 2_000_000
"""Larger gradients are not searched."""


def parts_of(issued: Issued, gradients: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The parameters whose gradients hold all elements of what goes into a collective; () if some
    are in none. The elements may have been divided by the number of ranks already.
    """
    if sum(one.numel() for one in gradients.values()) > MOST_ELEMENTS_SEARCHED:
        return ()
    found = [thinned(one.detach().reshape(-1), MOST_KEPT) for one in issued.tensors if one.numel()]
    if not found or not all(one.is_floating_point() for one in found):
        return ()
    eps = max(torch.finfo(one.dtype).eps for one in found)
    wanted = torch.cat([one.to("cpu", torch.float64) for one in found])
    wanted = torch.unique(wanted[wanted != 0])
    if len(wanted) < FEWEST or not bool(wanted.isfinite().all()):
        return ()
    values = {name: value for name, one in gradients.items() if len(value := _values(one))}
    for divisor in {1, len(issued.ranks)}:
        held = {name: _held(divisor * wanted, one, eps) for name, one in values.items()}
        if held and bool(torch.stack([*held.values()]).any(0).all()):
            return tuple(name for name, of_name in held.items() if bool(of_name.any()))
    return ()


def _held(wanted: Tensor, values: Tensor, eps: float) -> Tensor:
    """Which of these ascending numbers are among the values, up to rounding."""
    at = torch.searchsorted(wanted, values)
    is_held = torch.zeros(len(wanted), dtype=torch.bool)
    for nearest in (at.clamp(max=len(wanted) - 1), (at - 1).clamp(min=0)):
        near = (values - wanted[nearest]).abs() <= 4 * eps * values.abs()
        is_held[nearest[near]] = True
    return is_held


def _values(gradient: Tensor) -> Tensor:
    try:
        return plain(gradient.detach()).to("cpu").reshape(-1).double()
    except (NotPlain, RuntimeError):  # it has no values of its own, or is sparse
        return torch.empty(0, dtype=torch.float64)
