"""The window of micro-batches ends at another one than the one that reduces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Way]:
    return tuple(
        Way(predicted, f"reduced after micro-batch {number} of {count}")
        for number, count, predicted in reduced_early(view)
    ) + tuple(
        Way(predicted, f"without micro-batch {number} of {count}")
        for number, count, predicted in _ended_early(view)
    )


def reduced_early(view: View) -> list[tuple[int, int, Tensor]]:
    """(micro-batch, how many, prediction): those up to it are averaged, the rest stays local."""
    count = view.micro_batches
    if view.parts is None or count in (None, 1) or len(view.ranks) != view.world_size:
        return []
    assert count is not None
    found = []
    for way in view.micro:
        if any(len(of_rank) != count for of_rank in way):
            continue
        pieces = torch.stack([torch.stack(of_rank) for of_rank in way])
        for number in range(1, count):
            held = pieces[:, :number].sum(1).mean(0) + pieces[:, number:].sum(1)
            found.append((number, count, view.of_the_ranks(held)))
    return found


def _ended_early(view: View) -> list[tuple[int, int, Tensor]]:
    """One micro-batch of the window is missing, the first or the last."""
    count = view.micro_batches
    if view.parts is None or count is None or count < 3:
        return []  # of two, only one is left: another cause
    found = []
    for way in view.micro:
        if any(len(of_rank) != count for of_rank in way):
            continue
        pieces = torch.stack([torch.stack(of_rank) for of_rank in way])
        for number in (0, count - 1):
            held = (pieces.sum(1) - pieces[:, number]).mean(0)
            found.append((number + 1, count, view.everywhere(held)))
    return found


def sign(view: View) -> Sign | None:
    flags = [one.synchronised for one in indications.wrappers(view) if one.synchronised]
    if not flags:
        return None
    early = all(any(of_one[:-1]) and not of_one[-1] for of_one in flags)
    return (
        Sign(True, "synchronisation was off in the last forward pass, on before") if early else None
    )


HYPOTHESIS = Hypothesis(
    name="accumulation_boundary_off_by_one",
    sentence="Gradients were reduced at another micro-batch than the last of the window: what came "
    "after it stays local, or is lost.",
    look_at="the condition that leaves no_sync, such as (i + 1) % accumulation_steps == 0, and the "
    "last window of an epoch",
    predict=predict,
    sign=sign,
    tell_apart="at least two micro-batches, of different examples",
)
