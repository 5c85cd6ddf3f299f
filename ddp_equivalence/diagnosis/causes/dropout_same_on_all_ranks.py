"""The step gives all ranks the same seed, so that they draw the same random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.causes.dropout_differs_from_reference import (
    replayed,
    step_set_the_same_seed,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_loss import DROPOUTS, draw_lines, module_lines
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind


def predict(view: View) -> Sequence[Prediction]:
    """The mean of gradients that were computed with the masks that the ranks drew."""
    if view.parts.count == 1 or not view.examples.draws_random_numbers:
        return ()
    observed = [Prediction(view.on_every_rank(one)) for one in view.averages_of_node_sums()]
    return (*observed, *replayed(view))


def indication(view: View) -> Indication | None:
    """Compares the seeds before the forward passes of the ranks."""
    if step_set_the_same_seed(view):
        because = "the step set the same seed on all ranks before its forward pass"
        return Indication(True, because)
    return Indication(False, "the step did not set the same seed on all ranks")


def lines(view: View) -> Sequence[PointedLine]:
    """Where all ranks are given the same seed, and the first dropout or other draw after it."""
    seeded = [
        place.pointed(f"seeds every rank with {place.first.value:.0f}", is_fault=True)
        for place in _same_seeds(view)[-1:]
    ]
    after = "drops the same positions on every rank"
    modules = module_lines(view, DROPOUTS, after, is_property=False)
    modules = modules or draw_lines(view, "draws the same numbers on every rank")[:1]
    return [*seeded, *(replace(one, is_fault=not seeded) for one in modules)]


def _same_seeds(view: View) -> list[CallSite]:
    places = view.observed.calls.places(Kind.SEED, where=lambda call: call.backwards == 0)
    return [
        place
        for place in places
        if len(place.ranks) == view.world_size
        and len({calls[-1].value for calls in place.by_rank.values()}) == 1
    ]


def fix(view: View) -> str:
    """Add the rank to the seed."""
    seeds = _same_seeds(view)
    seed = f"{seeds[-1].first.value:.0f}" if seeds else "seed"
    return f"torch.manual_seed({seed} + rank), after the weights are built alike on all ranks."


HYPOTHESIS = Hypothesis(
    name="dropout_same_on_all_ranks",
    sentence="The step gives all ranks the same seed, so that every rank draws the same random "
    "numbers (dropout, noise): those of different examples are not independent.",
    look_at="torch.manual_seed on every rank: add the rank to the seed once the weights are built",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone cannot decide: compare the states of the ranks' generators.",
    headline="all ranks draw the same dropout masks",
    lines=lines,
    fix=fix,
)
