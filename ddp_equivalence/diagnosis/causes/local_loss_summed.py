"""Each rank takes the sum over its examples, where the big batch takes the mean."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis import indications
from ddp_equivalence.diagnosis.hypothesis import Factor, Hypothesis, Sign
from ddp_equivalence.diagnosis.view import View


def factors(view: View) -> Sequence[Factor]:
    if view.is_sum():
        return ()
    found = {}
    for what, count in view.counts.items():
        found[count / view.world_size] = f"{count:g} {what} over {view.world_size} ranks"
        found[count] = f"{count:g} {what}, added over the ranks"
    return tuple(Factor(value, detail) for value, detail in found.items() if value not in (0, 1))


def sign(view: View) -> Sign | None:
    pairs = indications.losses(view)
    if pairs is None:
        return None
    larger = [value / own for value, own in pairs if own]
    if larger and all(indications.close(one, 1.0) for one in larger):
        return Sign(False, "backward began at the mean over the rank's own examples")
    return None


HYPOTHESIS = Hypothesis(
    name="local_loss_summed",
    sentence="Each rank's loss is the sum over its own examples; the big batch's is their mean.",
    look_at='the loss\'s reduction: "sum" where "mean" is meant, or a mean taken in one place only',
    factors=factors,
    sign=sign,
    tell_apart="another number of examples: only this factor follows it",
)
