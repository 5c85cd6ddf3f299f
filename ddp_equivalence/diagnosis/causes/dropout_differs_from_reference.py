"""Dropout, or whatever else draws random numbers, draws others than for the big batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_loss import DROPOUTS, draw_lines, module_lines
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The mean of gradients that were each computed with one part's own masks."""
    contributions = view.parts.contributions()
    if contributions is None or not view.examples.draws_random_numbers:
        return ()
    # The gradients that the ranks were seen to compute already contain the masks that they drew.
    observed = [Prediction(view.on_every_rank(one)) for one in view.averages_of_node_sums()]
    if view.parts.count == 1:
        return (*observed, *replayed(view))
    # With the same seed on every rank, each rank draws the masks that its shard alone would get.
    # This is so on the device that predictions run on; another device has another generator.
    same_seed = Prediction(view.on_every_rank(contributions.mean(0)))
    return (same_seed, *observed, *replayed(view))


def replayed(view: View) -> Sequence[Prediction]:
    """The mean of gradients with the masks of the ranks, drawn again from the states of their
    generators before each forward pass.
    """
    if view.observed.examples_read is None or not view.setting.draws_on_cpu:
        return ()
    contributions = []
    for rank, micro_batches in enumerate(view.observed.examples_read):
        forwards = view.observed.by_rank[rank].forwards
        if len(forwards) != len(micro_batches):
            return ()
        gradients = [
            view.examples.compute(examples, forward.generator).gradient
            for examples, forward in zip(micro_batches, forwards, strict=True)
        ]
        contributions.append(torch.stack(gradients).mean(0))
    return (Prediction(view.on_every_rank(torch.stack(contributions).mean(0))),)


def step_set_the_same_seed(view: View) -> bool | None:
    """True if the step itself set the same seed on all ranks; None if that is not known."""
    seeds = {
        tuple(forward.seed for forward in observation.forwards)
        for observation in view.observed.by_rank.values()
    }
    if not seeds or view.world_size == 1:
        return None
    return len(seeds) == 1 and view.setting.seed not in seeds.pop()


def indication(view: View) -> Indication | None:
    """Speaks against this cause if the step set one seed on all ranks, which is another cause."""
    if step_set_the_same_seed(view):
        return Indication(False, "the step gave all ranks the same seed")
    return None


def lines(view: View) -> Sequence[PointedLine]:
    """The first dropout in the forward pass; without one, the lines that draw random numbers."""
    modules = module_lines(view, DROPOUTS, "draws other masks for a shard than for the big batch")
    others = "draws random numbers, others for a shard than for the big batch: no fault"
    return modules or draw_lines(view, others)


def fix(view: View) -> str:
    """Turn dropout off while gradients are compared, or make what is drawn a part of the batch."""
    if not module_lines(view, DROPOUTS, "") and draw_lines(view, ""):
        return "none is needed; compare with these numbers as a part of the batch, or drawing none."
    return "none is needed; compare with dropout turned off (model.eval() or p=0)."


HYPOTHESIS = Hypothesis(
    name="dropout_differs_from_reference",
    sentence="The forward pass draws random numbers (dropout, noise), and draws others for a shard "
    "than for the big batch. This is a property of the model or loss, not a fault of the "
    "reduction.",
    look_at="what draws: turn dropout off while gradients are compared (model.eval() or p=0), and "
    "make other random numbers a part of the batch",
    predict=predict,
    indication=indication,
    headline="a shard draws other random numbers",
    lines=lines,
    fix=fix,
    tell_apart="Let the forward pass draw nothing (eval mode): this difference then goes away.",
    limits_must_catch=True,
)
