"""Where a difference is that nothing can be fitted to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.diagnosis.whereabouts.missing_gradients import where_gradients_are_missing
from ddp_equivalence.diagnosis.whereabouts.replayed_loss import replay_of_a_shard
from ddp_equivalence.diagnosis.whereabouts.whereabouts import Whereabouts, not_seen
from ddp_equivalence.measurement.observation import Observation


def where_without_view(
    observed: Mapping[int, Observation],
    expected: Mapping[GradientKey, Tensor | None],
    view_of_step: Callable[[int], View | None] | None,
    why_not_watched: str,
    why_no_view: str,
) -> Whereabouts | None:
    """What can be said about where it is. ``why_not_watched``: why nothing was ``observed``.

    ``expected``: the gradients of the big batch. ``view_of_step(0)``: the view of the only step
    before the ranks ran; None unless gradients may be missing there. ``why_no_view``: why nothing
    can be fitted.
    """
    if not observed:
        why = f", because {why_not_watched}" if why_not_watched else ""
        return not_seen(f"there was no second run{why}")
    if view_of_step is None:
        return not_seen(why_no_view)
    names = [name for (_, name), one in expected.items() if one is not None]
    view = view_of_step(0)
    replay = None if view is None else replay_of_a_shard(view.setting, view.time)
    return where_gradients_are_missing(observed, names, replay)
