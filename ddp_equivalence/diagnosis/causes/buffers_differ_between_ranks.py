"""The forward passes of the ranks read buffers that differ between the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.of_loss import buffer_changes, buffers_apart, forwards_of
from ddp_equivalence.diagnosis.lines.words import names_text
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View

MOST_LINES = 2


def predict(view: View) -> Sequence[Prediction]:
    """The mean of gradients that were each computed with the buffers of one rank.

    Empty where these are the gradients without them too, as in batch norm that trains.
    """
    read = view.observed.examples_read
    if read is None or not buffers_apart(view):
        return ()
    contributions, reads_them = [], False
    for rank, micro_batches in enumerate(read):
        forwards = forwards_of(view, rank)
        if len(forwards) != len(micro_batches):
            return ()
        gradients = []
        for examples, forward in zip(micro_batches, forwards, strict=True):
            generator = b""
            if view.setting.draws_on_cpu and view.examples.draws_random_numbers:
                generator = forward.generator
            found = view.examples.with_buffers(examples, generator, forward.buffers)
            without = view.examples.compute(examples, generator)
            reads_them |= not nearly_equal(found.gradient, without.gradient)
            gradients.append(found.gradient)
        contributions.append(torch.stack(gradients).mean(0))
    if not reads_them:
        return ()
    return (Prediction(view.on_every_rank(torch.stack(contributions).mean(0))),)


def indication(view: View) -> Indication | None:
    """Compares the buffers before the forward passes of the ranks."""
    if not any(forwards_of(view, rank) for rank in view.observed.by_rank):
        return None
    apart = buffers_apart(view)
    if not apart:
        return Indication(False, "no buffer differed between the ranks before a forward pass")
    because = f"before the forward pass, {names_text(apart)} differed between the ranks"
    return Indication(True, because)


def lines(view: View) -> Sequence[PointedLine]:
    """The lines that changed the buffers which differ."""
    apart = set(buffers_apart(view))
    places = [place for place in buffer_changes(view) if apart & set(place.names)]
    return [
        place.pointed(
            f"changes {names_text([name for name in place.names if name in apart])}, which "
            "differs between the ranks afterwards",
            is_fault=True,
        )
        for place in places[:MOST_LINES]
    ]


def fix(view: View) -> str:
    """Reduce the buffers."""
    names = names_text(buffers_apart(view))
    return f"reduce {names} over all ranks after each change, or broadcast from rank 0."


HYPOTHESIS = Hypothesis(
    name="buffers_differ_between_ranks",
    sentence="Buffers of the model (running statistics, moving averages) differ between the ranks, "
    "and the forward pass reads them, so that gradients of different functions were averaged.",
    look_at="the lines that change a buffer: reduce what they write over all ranks, or let "
    "DistributedDataParallel broadcast the buffers before each forward pass",
    predict=predict,
    indication=indication,
    headline="ranks read different buffers",
    lines=lines,
    fix=fix,
    tell_apart="Gradients alone cannot decide: compare the buffers before the forward pass.",
)
