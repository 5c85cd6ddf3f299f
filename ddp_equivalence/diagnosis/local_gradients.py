"""Candidates for every rank's own gradient before any reduction: observed or computed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.batch_parts import BatchParts
from ddp_equivalence.diagnosis.observed_step import ObservedStep
from ddp_equivalence.diagnosis.residual import nearly_equal

MicroBatchGradients = tuple[tuple[Tensor, ...], ...]
"""For every rank, what each of its micro-batches adds to its local gradient, shape (elements,)."""


def observed_micro_batches(parts: BatchParts, observed: ObservedStep) -> MicroBatchGradients | None:
    """The gradients that each backward was seen to compute; None unless all ranks are known."""
    if not observed.covers_every_rank:
        return None
    expected = parts.examples.expected
    by_rank = []
    for rank in range(observed.setting.world_size):
        gradients = tuple(
            observed.setting.scale * call.gradient
            for call in observed.backwards(rank)
            if call.gradient is not None
        )
        if any(len(gradient) != len(expected) for gradient in gradients):
            return None
        by_rank.append(gradients or (torch.zeros_like(expected),))
    return tuple(by_rank)


def possible_micro_batches(
    parts: BatchParts, observed: ObservedStep, observed_gradients: MicroBatchGradients | None
) -> tuple[MicroBatchGradients, ...]:
    """What each micro-batch may have added to the rank's local gradient.

    There are up to three candidates: the gradients that were observed; the gradient of each part,
    divided by the number of the rank's parts; and the gradient of the examples that were read,
    multiplied by the loss at which backward began and divided by the loss of these examples.
    """
    candidates = [] if observed_gradients is None else [observed_gradients]
    gradient = parts.examples.gradient
    if parts.by_rank is not None:
        candidates.append(
            tuple(
                tuple(gradient(part) / len(of_rank) for part in of_rank)
                for of_rank in parts.by_rank
            )
        )
    ratios = loss_ratios(parts, observed)
    if ratios is not None and observed.examples_read is not None:
        candidates.append(
            tuple(
                tuple(
                    ratio * gradient(part)
                    for ratio, part in zip(ratios_of_rank, parts_read, strict=True)
                )
                for ratios_of_rank, parts_read in zip(ratios, observed.examples_read, strict=True)
            )
        )
    return tuple(candidates)


def sums_over_micro_batches(candidates: tuple[MicroBatchGradients, ...]) -> tuple[Tensor, ...]:
    """For each candidate, the sum over each rank's micro-batches, shape (world size, elements).

    Duplicates are left out, and so are sums that are not finite.
    """
    distinct: list[Tensor] = []
    for by_rank in candidates:
        local = torch.stack([torch.stack(micro_batches).sum(0) for micro_batches in by_rank])
        is_new = not any(nearly_equal(local, earlier) for earlier in distinct)
        if bool(local.isfinite().all()) and is_new:
            distinct.append(local)
    return tuple(distinct)


def loss_ratios(parts: BatchParts, observed: ObservedStep) -> tuple[tuple[float, ...], ...] | None:
    """For every backward of every rank, the loss at which it began over that of its examples.

    None if one of these losses is unknown, or if the loss of some examples is zero.
    """
    if observed.examples_read is None:
        return None
    by_rank = []
    for rank, micro_batches in enumerate(observed.examples_read):
        begun_at = [call.loss for call in observed.backwards(rank)]
        if len(begun_at) != len(micro_batches):
            return None
        losses = [parts.examples.loss(examples) for examples in micro_batches]
        if not all(losses) or any(loss is None for loss in begun_at):
            return None
        pairs = zip(begun_at, losses, strict=True)
        by_rank.append(tuple(begun / loss for begun, loss in pairs if begun is not None))
    return tuple(by_rank)
