"""Rank the explanations by how much of the measured gradients each leaves unexplained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_equivalence.building import Steps, build_batches, build_model, count_examples, in_step
from ddp_equivalence.case import Case
from ddp_equivalence.comparison import Comparison
from ddp_equivalence.diagnoses import HYPOTHESES
from ddp_equivalence.diagnoses.hypothesis import NEAR, Hypothesis, View, flatten, near, unexplained
from ddp_equivalence.facts import Indices
from ddp_equivalence.reference import Reference
from ddp_equivalence.shards import OWN, split

MAX_ELEMENTS = 2_000_000
"""Ranks x parameters that are kept to take a difference apart; beyond, only sums are."""

LEAST_ACCEPTED = 1e-10
"""What a right explanation may leave unexplained in float64: its own rounding."""


MOST_ACCEPTED = 0.3
"""An explanation that leaves more is none, however coarse the precision."""


@dataclass(frozen=True)
class Finding:
    """One explanation and what it leaves unexplained: ||measured - predicted|| / ||measured||.

    ``unexplained`` is None where no prediction was possible; ``shows`` is False where this fault
    would leave the big batch's gradient on this case.
    """

    cause: str
    sentence: str
    look_at: str
    unexplained: float | None
    accepted: bool
    shows: bool = True


@dataclass(frozen=True)
class NearestFault:
    """The planted fault that would be hardest to see here: ||predicted - expected||, relative."""

    cause: str
    distance: float


def can_be_taken_apart(reference: Reference, world_size: int) -> bool:
    """True if the gradients of all ranks are few enough to be kept."""
    values = [value for value in reference.expected.values() if value is not None]
    return sum(value.numel() for value in values) * world_size <= MAX_ELEMENTS


def view_of(
    case: Case,
    reference: Reference,
    ranks: tuple[int, ...],
    parts: tuple[tuple[Indices, ...], ...] | None = None,
    steps: Steps = 1,
    step: int = 0,
    lr: float = 0.1,
    scale: float = 1.0,
    on_cpu: bool = True,
    known: dict[Indices, Tensor] | None = None,
) -> View | None:
    """What hypotheses may look at in one step; None if the model is too large to take apart.

    ``known``: gradients of parts that another view of the same batch has already computed.
    """
    count = steps if isinstance(steps, int) else len(steps)
    model = build_model(case)
    shapes = {}
    for name, parameter in model.named_parameters():
        if reference.expected.get(in_step(name, step, count)) is not None:
            shapes[name] = tuple(parameter.shape)
    elements = sum(parameter.numel() for parameter in model.parameters())
    if elements * case.ranks.world_size > MAX_ELEMENTS or not shapes:
        return None
    batches = build_batches(case, steps)
    if parts is None and case.shards != OWN:
        deal = split(case.shards, count_examples(batches[step]), case.ranks.world_size)
        parts = tuple((indices,) for indices in deal.indices)
    return View(
        case=case,
        layout=case.ranks,
        expected=flatten(
            {name: reference.expected[in_step(name, step, count)] for name in shapes}, shapes
        ),
        shapes=shapes,
        ranks=ranks,
        parts=parts,
        batch=batches[step],
        before=tuple(batches[:step]),
        lr=lr,
        has_batch_norm=_has(model, nn.modules.batchnorm._BatchNorm),
        has_dropout=_has(model, nn.modules.dropout._DropoutNd) and reference.rounding.order_matters,
        scale=scale,
        on_cpu=on_cpu,
        known={} if known is None else known,
    )


def first_wrong_step(comparison: Comparison, steps: int) -> int:
    """The first step with a parameter beyond its limit: the weights before it were still right."""
    wrong = {one.name for one in comparison.differing}
    for step in range(1, steps):
        if any(name.endswith(in_step("", step - 1, steps)) for name in wrong):
            return step - 1
    return steps - 1


def diagnose(
    view: View, measured: Mapping[int, Mapping[str, Tensor | None]], comparison: Comparison
) -> tuple[Finding, ...]:
    """All explanations, best first; an accepted first one is the cause.

    ``measured``: rank -> name -> gradient of the step that the view is of.
    """
    seen = torch.stack([flatten(dict(measured[rank]), view.shapes) for rank in view.ranks])
    # The limit of all parameters together, as one vector.
    limits = sum(one.limit.absolute**2 for one in comparison.parameters)
    norms = sum(one.norm**2 for one in comparison.parameters)
    limit = (limits / norms) ** 0.5 if norms > 0 else 0.0
    accepted = max(LEAST_ACCEPTED, min(4 * limit, MOST_ACCEPTED))
    found = [_judge(one, view, seen, accepted) for one in HYPOTHESES]
    ranked = sorted(
        (one for one in found if one is not None),
        key=lambda one: (not one.accepted, _size(one.unexplained)),
    )
    if ranked and not ranked[0].accepted and comparison.ranks_agree:
        ranked = _believe_plausible(view, ranked)
    return tuple(ranked)


def nearest_fault(view: View) -> NearestFault | None:
    """The hypothesis whose prediction lies nearest to the big batch without being it."""
    size = float(view.expected.norm())
    best = None
    for one in HYPOTHESES:
        for predicted in one.predict(view) if size > 0 else ():
            # One wrong rank is enough to be seen.
            distance = float((predicted - view.expected).norm(dim=1).max()) / size
            if distance > NEAR and (best is None or distance < best.distance):
                best = NearestFault(one.name, distance)
    return best


def diagnose_by_factor(comparison: Comparison, world_size: int) -> tuple[Finding, ...]:
    """For models too large to keep: what one factor for all parameters and ranks says."""
    factors = [rank.factor for one in comparison.parameters for rank in one.by_rank]
    rest = max((r.unexplained for p in comparison.parameters for r in p.by_rank), default=1.0)
    if not factors or world_size == 1 or rest > 1e-3:
        return ()
    by_name = {one.name: one for one in HYPOTHESES}
    causes = {
        float(world_size): ("sum_not_mean",),
        1 / world_size: ("mean_not_sum", "averaged_twice"),
    }
    for factor, names in causes.items():
        if all(abs(one / factor - 1) < 1e-3 for one in factors):
            return tuple(
                Finding(name, by_name[name].sentence, by_name[name].look_at, rest, accepted=True)
                for name in names
            )
    return ()


def _judge(one: Hypothesis, view: View, seen: Tensor, accepted: float) -> Finding | None:
    ways = one.predict(view)
    if not ways:
        return None
    shows = any(not near(predicted, view.everywhere(view.expected)) for predicted in ways)
    rest = min(unexplained(seen, predicted) for predicted in ways)
    # Two explanations that differ by rounding only fit equally well.
    rest = 0.0 if rest < LEAST_ACCEPTED / 10 else rest
    return Finding(one.name, one.sentence, one.look_at, rest, shows and rest <= accepted, shows)


def _believe_plausible(view: View, ranked: list[Finding]) -> list[Finding]:
    for one in HYPOTHESES:
        if one.plausible(view):
            others = [other for other in ranked if other.cause != one.name]
            first = Finding(one.name, one.sentence, one.look_at, None, accepted=True)
            return [first, *others]
    return ranked


def _size(value: float | None) -> float:
    return float("inf") if value is None else value


def _has(model: nn.Module, kind: Any) -> bool:
    return any(isinstance(module, kind) and module.training for module in model.modules())
