"""Every rank scaled its loss, and unscaled its gradient, with a scale of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.indications import losses_close
from ddp_equivalence.diagnosis.view import View

EQUAL = 1e-2
"""Scales whose relative difference is smaller are equal."""

NO_WEIGHT = 1e-9
"""A weight that is smaller than this, relative to the largest, counts as zero."""


def predict(view: View) -> Sequence[Prediction]:
    """The mean of the scaled gradients, unscaled on each rank by its own scale.

    Rank r then holds rank 0's gradient times (scale of rank 0 / scale of rank r). The scales
    follow from the weights of the ranks.
    """
    weights = view.weights_of_ranks
    if weights is None or view.world_size == 1 or not view.setting.every_rank_reports:
        return ()
    if bool((weights.abs() < NO_WEIGHT * weights.abs().max()).any()):
        return ()
    scales = (weights[0] / weights).mean(1)
    if float((scales - 1).abs().max()) < EQUAL or bool((scales <= 0).any()):
        return ()
    ratio = " : ".join(f"{scale:.4g}" for scale in scales.tolist())
    return tuple(
        Prediction(
            view.on_reporting_ranks((scales[:, None] * local).mean(0) / scales[:, None]),
            f"the ratio of the ranks' scales is {ratio}",
        )
        for local in view.local_gradients
    )


def indication(view: View) -> Indication | None:
    """Compares, between ranks, the loss that backward began at with the loss of its examples."""
    read = view.observed.examples_read
    if read is None:
        return None
    ratios = []
    for rank, observation in sorted(view.observed.by_rank.items()):
        own_loss = view.examples.loss(read[rank][0])
        if observation.backwards and own_loss:
            ratios.append((observation.backwards[0].loss or 0.0) / own_loss)
    ratios = [ratio for ratio in ratios if ratio == ratio]
    if len(ratios) < 2 or all(losses_close(ratio, ratios[0]) for ratio in ratios):
        return None
    values = ", ".join(f"{ratio:.4g}" for ratio in ratios)
    because = f"backward began at {values} times (by rank) the loss of the rank's own examples"
    return Indication(True, because)


HYPOTHESIS = Hypothesis(
    name="scaler_differs_between_ranks",
    sentence="Each rank scaled its loss and unscaled the reduced gradient with a scale of its own.",
    look_at="the code that computes the scale: reduce the scale, or its input, before it is used. "
    "With a GradScaler on each rank, found_inf must be reduced so that all ranks change their "
    "scale together (torch.distributed.fsdp.sharded_grad_scaler does this)",
    predict=predict,
    indication=indication,
    tell_apart="Take two steps: a scaler changes its scale between them.",
)
