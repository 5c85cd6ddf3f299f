"""The cause of an update that is missing: no optimizer stepped, and no weight moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ddp_equivalence.comparison.comparison import Comparison
from ddp_equivalence.diagnosis.finding import Finding
from ddp_equivalence.diagnosis.pointed_line import PointedLine
from ddp_equivalence.measurement.calls import Kind
from ddp_equivalence.measurement.observation import Observation
from ddp_equivalence.measurement.request import Request
from ddp_equivalence.measurement.work import Evidence

NAME = "no_optimizer_step"


class Seen(Protocol):
    """What a verdict knows of the ranks."""

    @property
    def comparison(self) -> Comparison | None: ...
    @property
    def evidence(self) -> Mapping[int, Evidence]: ...
    @property
    def observed(self) -> Mapping[int, Observation]: ...


def no_optimizer_step(request: Request, seen: Seen) -> Finding | None:
    """The finding if no optimizer stepped in a step that trains, and no weight moved; else None."""
    comparison, observed = seen.comparison, seen.observed
    if not request.trains or any(one.optimizer_steps for one in seen.evidence.values()):
        return None
    if comparison is None or comparison.structure or not comparison.parameters:
        return None
    if any(error.ratio != 0 for one in comparison.parameters for error in one.by_rank):
        return None
    went_backward = [one for one in observed.values() if one.backwards]
    ran = f"backward ran {len(went_backward[0].backwards)} x, and " if went_backward else ""
    return Finding(
        cause=NAME,
        sentence="No optimizer steps, so the weights are what they were before.",
        look_at="where optimizer.step() is called: a condition that is never true, an accelerator "
        "or scaler that skips it, or an optimizer that holds other parameters",
        unexplained=0.0,
        accepted=True,
        fits=True,
        because=f"{ran}no optimizer of torch stepped on any rank; no weight moved",
        headline="no optimizer steps, so no weight moves",
        fix="call optimizer.step() after backward, on the parameters of the model that is given.",
        lines=tuple(_lines(observed)),
    )


def _lines(observed: Mapping[int, Observation]) -> list[PointedLine]:
    """The last line that went backward, after which an optimizer should step."""
    for seen in observed.values():
        lines = [call.line for call in seen.calls if call.kind is Kind.BACKWARD and call.line]
        if lines:
            return [PointedLine(lines[-1], "no optimizer steps after it", True, "optimizer.step()")]
    return []
