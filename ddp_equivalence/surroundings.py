"""What lies around a measured gradient: predictions of every fault, computed when asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache

from torch import Tensor

from ddp_equivalence.building import Steps
from ddp_equivalence.case import Case
from ddp_equivalence.comparison import ParameterComparison
from ddp_equivalence.diagnoses.hypothesis import View
from ddp_equivalence.diagnosis import NearestFault, nearest_fault, view_of
from ddp_equivalence.facts import Indices, facts_of
from ddp_equivalence.reference import Reference
from ddp_equivalence.request import Request
from ddp_equivalence.tolerance import Noise


class Surroundings:
    """Of one request and its reference; a check that is plainly the same never asks."""

    def __init__(self, request: Request, reference: Reference) -> None:
        self._request, self._reference = request, reference

    @cached_property
    def view(self) -> View | None:
        """What hypotheses may look at in the first step."""
        return self.view_of_step(0)

    @cached_property
    def nearest(self) -> NearestFault | None:
        """The fault that would be hardest to see; None where the model is too large to tell."""
        return nearest_fault(self.view) if self.view is not None else None

    def floor_of(self, one: ParameterComparison) -> float:
        """What rounding alone does to this parameter on one device, relative to its norm."""
        noise = self._reference.rounding.noise.get(one.name, Noise())
        return noise.norm / one.norm if one.norm > 0 else 0.0

    def view_of_step(self, step: int) -> View | None:
        """What hypotheses may look at in one step."""
        request, case = self._request, self._request.case
        if request.compare == "update" and request.step_count > 1:
            return None  # after the first step the weights of a wrong run are its own
        parts: tuple[tuple[Indices, ...], ...] | None = None
        if request.strategy is not None and case.is_catalogue:
            parts = request.strategy.contributions(facts_of(case, request.steps)[step])
        scale = -request.lr if request.compare == "update" else 1.0
        known = None
        if case.is_catalogue:
            known = _known_gradients(without_ranks(case), request.steps, step, request.lr, scale)
        return view_of(
            case,
            self._reference,
            ranks=tuple(range(request.processes.world_size)),
            parts=parts,
            steps=request.steps,
            step=step,
            lr=request.lr,
            scale=scale,
            on_cpu=request.lane.device_type == "cpu",
            known=known,
        )


def without_ranks(case: Case) -> Case:
    """The case as one device sees it. Of a catalogue case only the batch depends on layout and
    shards: through its size and, where the last shard is padded, its targets.
    """
    if case.shards == "no_valid_token":
        return case
    return replace(case, layout="1x1", shards="equal", examples=case.catalogue_examples)


@lru_cache(maxsize=256)
def _known_gradients(
    case: Case, steps: Steps, step: int, lr: float, scale: float
) -> dict[Indices, Tensor]:
    """Filled by the views of one catalogue case: strategies meet the same parts of it again."""
    return {}
