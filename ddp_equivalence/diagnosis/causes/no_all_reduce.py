"""Every rank kept the gradient of its own shard, for a reason that was not observed."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.reduced import gradients_were_reduced, reduced_parameters
from ddp_equivalence.diagnosis.view import View

TELL_APART = (
    "Gradients alone cannot decide: look at what was called, with which flags, and which "
    "collectives ran."
)


def predict(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient, unless gradients were seen to be reduced."""
    return () if gradients_were_reduced(view) else kept_local(view)


def kept_local(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient, whatever was reduced."""
    if view.world_size == 1 or not view.setting.every_rank_reports:
        return ()
    predictions = [Prediction(view.on_reporting_ranks(local)) for local in view.local_gradients]
    return (*predictions, *_fitted(view))


def _fitted(view: View) -> Sequence[Prediction]:
    """The local gradients are unknown: take those whose mean, or whose sum, is the big batch.

    They fit whatever has the right mean, so it must be certain that no gradient was reduced.
    """
    measured = view.measured
    if view.observed_gradients is not None or not measured.is_known:
        return ()
    if gradients_were_reduced(view) is not False:
        return ()
    if measured.only_some_parameters_differ or not measured.ranks_differ:
        return ()
    deviations = measured.by_rank - measured.by_rank.mean(0)
    return (
        Prediction(deviations + view.expected, fitted=True),
        Prediction(
            deviations + view.expected / view.world_size,
            "their sum is the big batch",
            fitted=True,
        ),
    )


def indication(view: View) -> Indication | None:
    """Looks at what went through a reduction."""
    if not view.observed.by_rank or reduced_parameters(view):
        return None
    if gradients_were_reduced(view) is False and not view.observed.wrappers:
        because = "no gradient went through a collective, and there was no wrapper"
        return Indication(True, because)
    return None


HYPOTHESIS = Hypothesis(
    name="no_all_reduce",
    sentence="No gradient was reduced: every rank holds the gradient of its own shard.",
    look_at="the call of the wrapper (ddp(...), not ddp.module(...)), no_sync, and whether the "
    "wrapper is still alive when backward runs",
    predict=predict,
    indication=indication,
    tell_apart=TELL_APART,
    limits_must_catch=True,
)
