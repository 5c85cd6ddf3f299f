"""Every rank scaled and unscaled by a number of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Sign, Way
from ddp_equivalence.diagnosis.view import View

APART = 1e-2
"""Scales nearer to each other than this are one scale."""

LEAST = 1e-9
"""What a rank holds of another, against the most, if it holds anything of it."""


def predict(view: View) -> Sequence[Way]:
    weights = view.weights
    if weights is None or view.world_size == 1 or len(view.ranks) != view.world_size:
        return ()
    if bool((weights.abs() < LEAST * weights.abs().max()).any()):
        return ()
    # What rank r holds of any rank is what rank 0 holds of it, times scale 0 over scale r.
    scales = (weights[0] / weights).mean(1)
    if float((scales - 1).abs().max()) < APART or bool((scales <= 0).any()):
        return ()
    told = " : ".join(f"{scale:.4g}" for scale in scales.tolist())
    return tuple(
        Way(
            view.of_the_ranks((scales[:, None] * own).mean(0) / scales[:, None]),
            f"the ranks' scales are as {told}",
        )
        for own in view.owns
    )


def sign(view: View) -> Sign | None:
    pairs = [
        (seen.backwards[0].loss or 0.0) / view.piece(view.read[rank][0]).loss
        for rank, seen in sorted(view.observed.items())
        if view.read is not None and seen.backwards and view.piece(view.read[rank][0]).loss
    ]
    pairs = [one for one in pairs if one == one]
    if len(pairs) > 1 and not all(indications.close(one, pairs[0]) for one in pairs):
        told = ", ".join(f"{one:.4g}" for one in pairs)
        return Sign(True, f"backward began at {told} times the loss of the rank's own examples")
    return None


HYPOTHESIS = Hypothesis(
    name="scaler_differs_between_ranks",
    sentence="Each rank scaled its loss and unscaled the reduced gradient by a scale of its own.",
    look_at="where the scale is computed: reduce it, or what it is taken from, before it is used. "
    "Of a GradScaler on each rank found_inf must be reduced, so that all change their scale "
    "together (torch.distributed.fsdp.sharded_grad_scaler does)",
    predict=predict,
    sign=sign,
    tell_apart="two steps, since a scaler changes its scale between them",
)
