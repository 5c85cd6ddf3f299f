"""What a report says of one step beside its verdict."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.observed_scripts.as_case import ObservedStep
from ddp_equivalence.observed_scripts.seen_without_reference import text_of_clips


@dataclass(frozen=True)
class StepFacts:
    """``optimizers``: the classes of those that stepped. ``rows``: that all ranks read together.

    ``micro_batches``: the backward passes of a rank. ``loss``: the mean at which these began.
    ``clips``: what was clipped, in words.
    """

    optimizers: tuple[str, ...]
    rows: int
    micro_batches: int
    loss: float
    clips: str

    @classmethod
    def of(cls, step: ObservedStep) -> StepFacts:
        """What the record shows."""
        recorded = [step.record.step(rank, step.number) for rank in range(step.record.world_size)]
        losses = [loss for one in recorded for loss in one.losses]
        return cls(
            optimizers=recorded[0].optimizers,
            rows=len(step.rows),
            micro_batches=max(len(one.losses) for one in recorded),
            loss=sum(losses) / max(1, len(losses)),
            clips=text_of_clips(step),
        )
