"""Every rank kept the gradient of its own shard, for a reason that was not observed."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines.lines_of_wrapping import (
    lines_of_hook_state,
    lines_that_keep_from_reducing,
)
from ddp_equivalence.diagnosis.reduced import gradients_were_reduced, reduced_parameters
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Kind

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


def lines(view: View) -> Sequence[PointedLine]:
    """The hook that reduces nothing, or the last backward, after which nothing is reduced."""
    calls = view.observed.calls
    hooks = calls.places(Kind.HOOK)
    if hooks:
        of_all = (call for of_rank in calls.by_rank.values() for call in of_rank)
        reduces = any(call.collective is not None and call.in_backward for call in of_all)
        note = "" if reduces else "no collective was seen in this hook"
        return lines_of_hook_state(view) or [hooks[-1].pointed(note, True)]
    unreached = [] if calls.reductions else lines_that_keep_from_reducing(view)
    if unreached:
        return unreached
    missing = f"an all_reduce of every gradient over {view.world_size} ranks"
    note = "no collective reduces its gradients"
    return [
        place.pointed(note, True, missing)
        for place in calls.backwards[-1:]
        if not calls.reductions and not view.observed.wrappers
    ]


def fix(view: View) -> str:
    """Reduce the gradients."""
    count = view.world_size
    if view.observed.calls.places(Kind.HOOK):
        return f"let the hook all_reduce its bucket over the {count} ranks, and divide by {count}."
    if not view.observed.by_rank or view.observed.wrappers:
        return f"let DDP reduce, or all_reduce each gradient yourself, and divide by {count}."
    return f"after backward all_reduce each gradient over {count} ranks, and divide by {count}."


HYPOTHESIS = Hypothesis(
    name="no_all_reduce",
    sentence="No gradient was reduced: every rank holds the gradient of its own shard.",
    look_at="the call of the wrapper (ddp(...), not ddp.module(...)), no_sync, and whether the "
    "wrapper is still alive when backward runs",
    predict=predict,
    indication=indication,
    tell_apart=TELL_APART,
    headline="gradients are never reduced",
    lines=lines,
    fix=fix,
    limits_must_catch=True,
)
