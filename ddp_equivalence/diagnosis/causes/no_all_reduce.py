"""Every rank kept the gradient of its own shard, for a reason that was not observed."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.view import View

TELL_APART = (
    "Gradients alone cannot decide: look at what was called, with which flags, and which "
    "collectives ran."
)


def predict(view: View) -> Sequence[Prediction]:
    """Every rank's local gradient."""
    if view.world_size == 1 or not view.setting.every_rank_reports:
        return ()
    predictions = [Prediction(view.on_reporting_ranks(local)) for local in view.local_gradients]
    return (*predictions, *_fitted(view))


def _fitted(view: View) -> Sequence[Prediction]:
    """The local gradients are unknown: take those whose mean, or whose sum, is the big batch."""
    measured = view.measured
    if view.observed_gradients is not None or not measured.is_known:
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
    """Counts the elements that went through a reduction."""
    reduced = view.observed.reduced_elements
    fewest = min(2, view.parameters.total)
    if reduced is not None and reduced < fewest and not view.observed.wrappers:
        because = "no gradient went through a collective, and there was no wrapper"
        return Indication(True, because)
    return None


HYPOTHESIS = Hypothesis(
    name="no_all_reduce",
    sentence="Nothing was reduced: every rank holds the gradient of its own shard.",
    look_at="the call of the wrapper (ddp(...), not ddp.module(...)), no_sync, and whether the "
    "wrapper is still alive when backward runs",
    predict=predict,
    indication=indication,
    tell_apart=TELL_APART,
    limits_must_catch=True,
)
