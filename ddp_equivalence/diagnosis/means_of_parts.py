"""The mean of the ranks' gradients, where each loss is a mean over a part of the big batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.residual import nearest_factor, nearly_equal, unexplained
from ddp_equivalence.diagnosis.setting import reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind


class Over(Enum):
    """What the loss of a backward pass is a mean over. The value is a phrase for a report."""

    MICRO_BATCH = "each micro-batch of a rank"
    WINDOW = "all micro-batches of a rank"
    ALL_RANKS = "each micro-batch of all ranks together"


def means_over(view: View) -> Mapping[Over, Tensor]:
    """What all ranks hold, for each way to take means that does not give the big batch.

    The means count equally: those of a rank's micro-batches, and those of the ranks. A way that
    gives the same as an earlier one is left out. Empty where the parts are not known.
    """
    by_rank, contributions = view.parts.by_rank, view.parts.contributions()
    if by_rank is None or contributions is None:
        return {}
    found = {Over.MICRO_BATCH: contributions.mean(0)}
    gradient = view.examples.gradient
    if any(len(parts) > 1 for parts in by_rank):
        shards = view.parts.examples_by_rank
        found[Over.WINDOW] = torch.stack([gradient(shard) for shard in shards]).mean(0)
    count = view.parts.micro_batches_per_rank
    if count is not None and count > 1 and view.world_size > 1:
        at_once = [tuple(i for part in parts for i in part) for parts in zip(*by_rank, strict=True)]
        found[Over.ALL_RANKS] = torch.stack([gradient(part) for part in at_once]).mean(0)
    distinct: dict[Over, Tensor] = {}
    for over, mean in found.items():
        if not any(nearly_equal(mean, one) for one in (view.expected, *distinct.values())):
            distinct[over] = mean
    return distinct


def is_mean_of_blocks(view: View) -> bool:
    """True if the big batch is the mean of blocks of its order, and the ranks read other parts of
    the same sizes: its loss then joins neighbours, such as the answers to one prompt.
    """
    parts = [part for of_rank in view.parts.by_rank or () for part in of_rank]
    size = len(parts[0]) if parts else 0
    if not size or {*map(len, parts)} != {size} or size * len(parts) != view.setting.example_count:
        return False
    blocks = [tuple(range(n * size, (n + 1) * size)) for n in range(len(parts))]
    if {*map(frozenset, blocks)} == {*map(frozenset, parts)}:
        return False
    mean = torch.stack([view.examples.gradient(block) for block in blocks]).mean(0)
    return nearly_equal(mean, view.expected)


def nearest_mean(view: View) -> Over:
    """The way to take means whose gradient is, up to a factor, nearest to what the ranks hold."""
    means = means_over(view)
    if not means or not view.measured.is_known:
        return Over.MICRO_BATCH

    def rest(over: Over) -> float:
        mean, held = means[over], view.measured.by_rank.mean(0)
        factor = nearest_factor(held, mean)
        return 1.0 if factor is None else unexplained(held, factor * mean)

    return min(means, key=rest)


ADDED_TO_NORM = 1e-6
"""torch's clip_grad_norm_ adds this to the norm that it divides by.

Source: torch 2.13, torch/nn/utils/clip_grad.py.
"""

BY_NORM = ("clip_grad_norm_", "clip_grads_with_norm_")


@dataclass(frozen=True)
class Clip:
    """One clipping of a norm. ``names``: of the parameters that it was given; () if not known.

    ``added``: to the norm that is divided by. ``norms``: those that torch found, of each rank or of
    the one rank whose call it is; () if they are not known.
    """

    max_norm: float
    names: tuple[str, ...] = ()
    added: float = ADDED_TO_NORM
    norms: tuple[float, ...] = field(default=(), compare=False)


Event = Clip | int | None
"""What happened to a rank's gradients: clipped, added to by this backward, or (None) reduced."""


def clips_norm(call: Call) -> bool:
    """True for a call of clip_grad_norm_ with a norm that is known."""
    return call.kind is Kind.CLIP and call.what in BY_NORM and call.value is not None


EQUAL = 1e-3
"""Norms whose relative difference is smaller are equal, but for what is added to them."""


def norm_before_clipping(view: View, max_norm: float) -> float | None:
    """The norm of the big batch's gradient before the reference clipped it to ``max_norm``; None if
    it did not. What torch adds to a norm that it divides by shows how large this was.
    """
    left = float(view.expected.norm())
    if not 0 < max_norm - left < EQUAL * max_norm:
        return None
    return ADDED_TO_NORM * left / (max_norm - left)


def clipped(view: View, rows: Tensor, clip: Clip) -> Tensor:
    """Each of the rows, shape (rows, elements), clipped as ``clip_grad_norm_`` does it.

    Their norms are those of ``clip`` if not all elements are kept; one for each row must be known.
    """
    names = clip.names or view.parameters.names
    positions = view.parameters.positions_of(
        [one for one in names if one in view.parameters.places]
    )
    norms = rows[:, positions].norm(dim=1, keepdim=True)
    if not view.parameters.sample.is_whole:
        norms = torch.tensor(clip.norms, dtype=rows.dtype)[:, None].expand_as(norms)
    result = rows.clone()
    result[:, positions] *= torch.clamp(clip.max_norm / (norms + clip.added), max=1.0)
    return result


def events_of(view: View, rank: int) -> list[Event]:
    """What happened to the gradients of this rank in the step, in its order."""
    events: list[Event] = []
    by_ddp = any(any(wrapper.synchronised) for wrapper in view.observed.wrappers)
    backwards = view.observed.backwards(rank)
    number = 0
    for call in view.observed.calls.of(rank):
        if call.kind is Kind.BACKWARD and number < len(backwards):
            events.append(number)
            before, after = backwards[number].issued
            if by_ddp and before is not None and after is not None and after > before:
                events.append(None)
            number += 1
        elif reduces_gradients(call) and events and events[-1] is not None:
            events.append(None)
        elif clips_norm(call):
            assert call.value is not None
            norms = () if call.norm is None else (call.norm,)
            events.append(Clip(call.value, call.names, norms=norms))
    return events


def common_events(view: View) -> list[Event] | None:
    """What happened to the gradients of every rank, with the norms of all ranks; None if the ranks
    did not do the same, were not seen, or if a norm that is needed is not known.
    """
    if not view.observed.covers_every_rank:
        return None
    by_rank = [events_of(view, rank) for rank in range(view.world_size)]
    if any(events != by_rank[0] for events in by_rank):
        return None
    common: list[Event] = []
    for of_ranks in zip(*by_rank, strict=True):
        event, norms = of_ranks[0], [one.norms for one in of_ranks if isinstance(one, Clip)]
        if isinstance(event, Clip):
            if not all(norms) and not view.parameters.sample.is_whole:
                return None
            event = replace(event, norms=tuple(norm for of_rank in norms for norm in of_rank))
        common.append(event)
    return common


def replayed(view: View, events: Sequence[Event], gradients: Sequence[Tensor]) -> Tensor:
    """What the ranks hold after these events, each reduction being a mean.

    ``gradients``: what each backward added on the ranks, shape (world size, elements) each.
    """
    held = torch.zeros_like(gradients[0])
    for event in events:
        if event is None:
            held = held.mean(0).expand_as(held).clone()
        elif isinstance(event, Clip):
            held = clipped(view, held, event)
        else:
            held = held + gradients[event]
    return held


def gradients_by_backward(view: View) -> list[Tensor] | None:
    """What each backward of the step added on the ranks, shape (world size, elements) each.

    None if the ranks did not call backward equally often, or if a gradient is not known.
    """
    if not view.observed.covers_every_rank:
        return None
    by_rank = [view.observed.backwards(rank) for rank in range(view.world_size)]
    if len(set(map(len, by_rank))) != 1 or not by_rank[0]:
        return None
    rows = []
    for calls in zip(*by_rank, strict=True):
        gradients = [call.gradient for call in calls]
        known = [one for one in gradients if one is not None and len(one) == len(view.expected)]
        if len(known) != len(gradients):
            return None
        rows.append(view.setting.scale * torch.stack(known))
    return rows
