"""What the checks of one catalogue case share, whatever their ranks are."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ddp_equivalence.case.case import Case
from ddp_equivalence.case.steps import Steps
from ddp_equivalence.case.training import Training
from ddp_equivalence.diagnosis.example_gradients import GradientCache


def without_ranks(case: Case) -> Case:
    """The case as one device sees it, which is the same for many layouts and shards.

    Layout and shards change only the batch of a catalogue case: its size and, where the last shard
    is padded, its targets.
    """
    if case.shards == "no_valid_token":
        return case
    return replace(case, layout="1x1", shards="equal", examples=case.catalogue_examples)


@lru_cache(maxsize=256)
def catalogue_cache(
    case: Case, steps: Steps, step: int, training: Training, scale: float
) -> GradientCache:
    """Shared by the views of one catalogue case, since many strategies ask for the same parts."""
    return {}
