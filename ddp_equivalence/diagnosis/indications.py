"""Indications from the losses at which backward began, and the words that indications share."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Indication
from ddp_equivalence.diagnosis.view import View

LOSS_ROUNDING = 1e-4
"""Losses that differ by less, relative to the larger one, are equal up to rounding in float32. In a
lower precision losses indicate nothing."""


def indication_if(
    holds: bool | None, because: str, otherwise: str, conclusive: bool = False
) -> Indication | None:
    """An indication for the cause if ``holds``, else one against it; None if ``holds`` is None."""
    if holds is None:
        return None
    return Indication(holds, because if holds else otherwise, conclusive and holds)


def ranks_by_number(ranks: Sequence[int]) -> str:
    """The ranks as text: ``rank 3``, ``ranks 1, 3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def micro_batches_of_a_rank(view: View) -> int:
    """The largest number of micro-batches of a rank, whether its rows were recognised or not."""
    known = max((len(of_rank) for of_rank in view.parts.by_rank or ()), default=1)
    return max(known, unrecognised_micro_batches(view))


def unrecognised_micro_batches(view: View) -> int:
    """How often each rank called backward, where it was not recognised what it read; else 1."""
    if view.observed.examples_read is not None:
        return 1
    counts = {len(view.observed.backwards(rank)) for rank in view.observed.by_rank}
    return counts.pop() if len(counts) == 1 else 1


def losses_close(loss: float, other_loss: float) -> bool:
    """True if two losses are equal up to rounding."""
    return abs(loss - other_loss) <= LOSS_ROUNDING * max(abs(loss), abs(other_loss))


def losses_of_backwards(view: View) -> list[tuple[float, float]] | None:
    """For every backward of every rank: the loss at which it began, and that of its own examples.

    A backward without one of these losses is left out. None if no backward has both.
    """
    if view.observed.examples_read is None:
        return None
    pairs = []
    for rank, micro_batches in enumerate(view.observed.examples_read):
        begun_at = [call.loss for call in view.observed.backwards(rank)]
        if len(begun_at) != len(micro_batches):
            return None
        for value, examples in zip(begun_at, micro_batches, strict=True):
            own = view.examples.loss(examples)
            if value is None or value != value or own != own:
                continue
            pairs.append((value, own))
    return pairs or None


def common_loss_factor(view: View) -> float | None:
    """The loss at which backward began, divided by the loss of the examples that were read.

    None if this ratio is not the same for every backward.
    """
    factors = [value / own for value, own in losses_of_backwards(view) or () if own]
    if not factors or not all(losses_close(factor, factors[0]) for factor in factors):
        return None
    return sum(factors) / len(factors)


def _every_rank_begins_at(view: View, loss: float) -> bool:
    """True if every backward of every rank began at this loss, and there are several ranks."""
    begun_at = [
        call.loss for rank in view.observed.by_rank for call in view.observed.backwards(rank)
    ]
    if view.world_size == 1 or not view.observed.covers_every_rank:
        return False
    return bool(begun_at) and all(
        value is not None and losses_close(value, loss) for value in begun_at
    )


def every_loss_is_the_big_batch_loss(view: View) -> bool:
    """True if every backward began at the loss of the whole batch, not of the examples it read."""
    pairs = losses_of_backwards(view)
    if pairs is None:
        return _every_rank_begins_at(view, view.examples.big_batch_loss)
    big_batch_loss = view.examples.big_batch_loss
    return all(losses_close(value, big_batch_loss) for value, _ in pairs) and not all(
        losses_close(own, big_batch_loss) for _, own in pairs
    )


def mean_loss_is_the_big_batch_loss(view: View) -> bool:
    """True if the ranks' losses are not those of their own examples alone, and their mean is the
    loss of the whole batch.

    Every rank goes backward once. A rank whose examples were not recognised has its share of them.
    """
    if view.world_size == 1 or not view.observed.covers_every_rank:
        return False
    backwards = [view.observed.backwards(rank) for rank in range(view.world_size)]
    begun_at = [calls[0].loss for calls in backwards if len(calls) == 1]
    losses = [loss for loss in begun_at if loss is not None and loss == loss]
    if len(losses) != view.world_size:
        return False
    if not losses_close(sum(losses) / len(losses), view.examples.big_batch_loss):
        return False
    own = [view.examples.loss(examples) for examples in view.parts.examples_by_rank]
    return not any(map(losses_close, losses, own))
