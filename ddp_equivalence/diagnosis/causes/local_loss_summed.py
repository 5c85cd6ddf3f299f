"""Each rank's loss is a sum where the big batch's is a mean."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, WrongFactor
from ddp_equivalence.diagnosis.indications import losses_close, losses_of_backwards
from ddp_equivalence.diagnosis.view import View


def factors(view: View) -> Sequence[WrongFactor]:
    """Every number that the mean may divide by, with and without an average over the ranks."""
    if view.parts.add_up_to_the_big_batch:
        return ()
    details = {}
    for unit, count in view.setting.divisor_candidates.items():
        details[count / view.world_size] = f"{count:g} {unit} over {view.world_size} ranks"
        details[count] = f"{count:g} {unit}, added over the ranks"
    return tuple(
        WrongFactor(value, detail) for value, detail in details.items() if value not in (0, 1)
    )


def indication(view: View) -> Indication | None:
    """Compares the losses at which backward began with the means over what was read."""
    pairs = losses_of_backwards(view)
    ratios = [value / own for value, own in pairs or () if own]
    if ratios and all(losses_close(ratio, 1.0) for ratio in ratios):
        return Indication(False, "backward began at the mean over the rank's own examples")
    return None


HYPOTHESIS = Hypothesis(
    name="local_loss_summed",
    sentence="Each rank's loss is the sum over its own examples; the big batch's is their mean.",
    look_at='the loss\'s reduction: "sum" where "mean" is meant, or a mean taken in one place only',
    factors=factors,
    indication=indication,
    tell_apart="Use another number of examples: only this factor follows it.",
)
