"""Every rank scaled its loss, and unscaled its gradient, with a scale of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction, losses_close
from ddp_equivalence.diagnosis.lines.of_reduction import line_of_reduction
from ddp_equivalence.diagnosis.lines.source_tree import lines_run_unevenly
from ddp_equivalence.diagnosis.lines.words import in_order
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind

EQUAL = 1e-2
"""Scales whose relative difference is smaller are equal."""

NO_WEIGHT = 1e-9
"""A weight that is smaller than this, relative to the largest, counts as zero."""

MOST_NUMBERS = 6
"""The scales of more ranks are not listed."""


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
    ratio = " : ".join(text_of(scale, ".4g") for scale in scales.tolist())
    return tuple(
        Prediction(
            view.on_reporting_ranks((scales[:, None] * local).mean(0) / scales[:, None]),
            f"the ratio of the ranks' scales is {ratio}",
        )
        for local in view.local_gradients
    )


def indication(view: View) -> Indication | None:
    """Compares, between ranks, the loss that backward began at with the loss of its examples."""
    ratios = _loss_ratios(view)
    if ratios is None:
        return None
    values = ", ".join(text_of(ratio, ".4g") for ratio in ratios)
    because = f"backward began at {values} times (by rank) the loss of the rank's own examples"
    return Indication(True, because)


def _loss_ratios(view: View) -> list[float] | None:
    """The loss at which each rank's first backward began, over that of its rows.

    None if they are equal, or not known.
    """
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
    return ratios


def lines(view: View) -> Sequence[PointedLine]:
    """Where each rank scales, and where it unscales, if this was seen."""
    calls = view.observed.calls
    scaled = [
        place.pointed(f"scales by {numbers}, by rank", True)
        for place in calls.places(Kind.SCALE)
        if (numbers := _by_rank(place, lambda call: call.value))
    ]
    begun = [] if scaled else _lines_of_scaled_loss(view)
    changed = [
        place.pointed(f"divides gradients by {numbers}, by rank", not scaled and not begun)
        for place in calls.changes()
        if (numbers := _by_rank(place, _divisor))
    ]
    if scaled or changed:
        uneven = [] if scaled else lines_run_unevenly(view)[:1]
        return in_order(
            view,
            *uneven,
            *scaled[-1:],
            *begun,
            *([] if uneven or begun else [line_of_reduction(view)]),
            *changed[-1:],
        )
    return in_order(view, line_of_reduction(view, is_fault=True))


def _lines_of_scaled_loss(view: View) -> list[PointedLine]:
    """The backward pass that began at another multiple of the rows' loss on each rank."""
    ratios = _loss_ratios(view)
    if ratios is None:
        return []
    numbers = ", ".join(text_of(one, ".4g") for one in ratios[:MOST_NUMBERS])
    more = ", ..." if len(ratios) > MOST_NUMBERS else ""
    note = f"begins at {numbers}{more} times the loss, by rank"
    return [place.pointed(note, is_fault=True) for place in view.observed.calls.backwards[:1]]


def _divisor(call: Call) -> float | None:
    factor = None if call.change is None else call.change.factor
    return 1 / factor if factor else None


def _by_rank(place: CallSite, number: Callable[[Call], float | None]) -> str:
    """The numbers of all ranks' first calls, as text; "" if they are equal or not known."""
    numbers = [number(place.by_rank[rank][0]) for rank in place.ranks]
    if None in numbers or all(losses_close(one or 0.0, numbers[0] or 0.0) for one in numbers):
        return ""
    shown = [text_of(one, ".4g") for one in numbers[:MOST_NUMBERS] if one is not None]
    return ", ".join(shown) + (", ..." if len(numbers) > MOST_NUMBERS else "")


def fix(view: View) -> str:
    """Use one scale."""
    count = view.world_size
    return f"give all {count} ranks one scale: reduce it, or its input, before it is used."


HYPOTHESIS = Hypothesis(
    name="scaler_differs_between_ranks",
    sentence="Each rank scaled its loss and unscaled the reduced gradient with a scale of its own.",
    look_at="the code that computes the scale: reduce the scale, or its input, before it is used. "
    "With a GradScaler on each rank, found_inf must be reduced so that all ranks change their "
    "scale together (torch.distributed.fsdp.sharded_grad_scaler does this)",
    predict=predict,
    indication=indication,
    tell_apart="Take two steps: a scaler changes its scale between them.",
    headline="each rank has its own scale",
    lines=lines,
    fix=fix,
)
