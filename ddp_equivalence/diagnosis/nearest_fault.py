"""The fault that the limits of a comparison are least likely to catch."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_equivalence.comparison.digits import in_order
from ddp_equivalence.diagnosis.causes import HYPOTHESES
from ddp_equivalence.diagnosis.residual import NEGLIGIBLE
from ddp_equivalence.diagnosis.view import View


@dataclass(frozen=True)
class NearestFault:
    """The cause whose prediction lies nearest to the big batch.

    ``distance``: ||predicted - expected|| / ||expected||, on the rank where it is largest.
    """

    cause: str
    distance: float


def nearest_fault(view: View) -> NearestFault | None:
    """The cause that would be hardest to see on this case; None if no cause would show.

    Raises OutOfTime.

    A prediction that equals the big batch does not count: that cause cannot show on this case.
    """
    expected_norm = float(view.expected.norm())
    if expected_norm == 0:
        return None
    nearest = None
    for hypothesis in HYPOTHESES:
        for prediction in hypothesis.predict(view) if hypothesis.limits_must_catch else ():
            # One wrong rank is enough to be seen.
            errors = (prediction.by_rank - view.expected).norm(dim=1)
            distance = float(errors.max()) / expected_norm
            # Of faults that are equally far away, up to rounding, the first is named.
            is_nearer = nearest is None or in_order(distance) < in_order(nearest.distance)
            if distance > NEGLIGIBLE and is_nearer:
                nearest = NearestFault(hypothesis.name, distance)
    return nearest
