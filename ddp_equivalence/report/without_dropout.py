"""Lines about a step that drops something on a GPU: what it gives with dropout turned off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_equivalence.comparison.digits import text_of
from ddp_equivalence.diagnosis.masks import ON_A_GPU
from ddp_equivalence.report.line import Line, labelled

if TYPE_CHECKING:
    from ddp_equivalence.report.verdict import Verdict

LABEL = "Without dropout: "


def without_dropout_lines(verdict: Verdict) -> list[Line]:
    """What the same step gives without dropout; nothing unless masks could not be predicted."""
    if not verdict.masks_unpredictable:
        return []
    again = verdict.without_dropout
    if verdict.outcome == "same":
        why = "the big batch could not be given the masks of the ranks"
        return labelled(LABEL, f"this is how the step was compared, since {why}")
    if again is None:
        return labelled(
            LABEL,
            f"the step was not judged, because it may not run again here; {ON_A_GPU}, so the masks "
            "alone make a difference, and nothing is known of other causes",
        )
    numbers = ""
    if again.error is not None and again.limit is not None:
        numbers = f", error {text_of(again.error, '.1e')}  limit {text_of(again.limit, '.1e')}"
    if again.outcome == "different":
        causes = " and ".join(again.causes) or "no known cause fits, so the masks are not the only"
        return labelled(LABEL, f"different{numbers}: {causes}{'' if again.causes else ' cause'}")
    reason = f": {again.reason}" if again.outcome == "unknown" else ""
    return labelled(LABEL, f"{again.outcome}{numbers}{reason}")
