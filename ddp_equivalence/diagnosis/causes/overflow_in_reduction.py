"""A sum over the ranks was too large for the type that it was computed in."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

SIXTEEN_BITS = {"Half": "float16", "c10::Half": "float16", "torch.float16": "float16"}
"""How torch's flight recorder calls the type that overflows where others do not."""


def indication(view: View) -> Indication | None:
    """Looks for gradients that are finite on every rank, and are not after they were reduced."""
    measured = view.measured
    if not measured.is_known or measured.is_finite or not view.observed.covers_every_rank:
        return None
    gradients = view.observed_gradients
    if gradients is None or not all(
        bool(one.isfinite().all()) for rank in gradients for one in rank
    ):
        return None
    narrow = _narrow_reductions(view)
    if not narrow:
        return None
    lost = int((~measured.by_rank[0].isfinite()).sum())
    elements = measured.by_rank.shape[1]
    return Indication(
        True,
        f"every rank's own gradients are finite, and {lost} of {elements} elements "
        f"on rank {view.setting.reporting_ranks[0]} are not, after a reduction in {narrow}",
        conclusive=True,
    )


def _narrow_reductions(view: View) -> str:
    """The narrow type in which every rank has reduced more than single numbers; "" if none."""
    found: set[str] = set()
    for seen in view.observed.by_rank.values():
        names = {
            SIXTEEN_BITS[one.dtype]
            for one in seen.collectives or ()
            if "reduce" in one.op and one.elements > 1 and one.dtype in SIXTEEN_BITS
        }
        if not names:
            return ""
        found |= names
    return ", ".join(sorted(found))


def lines(view: View) -> Sequence[PointedLine]:
    """Where the sum is computed."""
    calls = view.observed.calls
    places = calls.reductions or calls.places(
        Kind.COLLECTIVE,
        where=lambda call: bool(call.collective and call.collective.elements > 1),
    )
    note = "the sum over the ranks is too large for its type"
    return [place.pointed(note, is_fault=True) for place in (places or calls.backwards)[-1:]]


def fix(view: View) -> str:
    """Divide first, or add in a wider type."""
    return f"divide by {view.world_size} before the reduction, or reduce in float32."


HYPOTHESIS = Hypothesis(
    name="overflow_in_reduction",
    sentence="The sum of the ranks' gradients overflowed in the narrow type that it was reduced "
    "in: each rank's own gradients are finite.",
    look_at="a compression hook or a cast to float16 that adds before it divides, and the loss "
    "scale: divide by the world size first, or reduce in float32",
    indication=indication,
    tell_apart="Use a smaller loss scale: the gradients are then finite.",
    headline="the sum overflows where it is reduced",
    lines=lines,
    fix=fix,
)
