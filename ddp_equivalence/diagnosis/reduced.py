"""Whether the ranks were seen to reduce gradients, or parameters instead of them."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.step_calls import REDUCING, reduces_gradients
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Contents, Kind

OF_PARAMETERS = (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)
NOT_OF_GRADIENTS = (*OF_PARAMETERS, Contents.BUFFERS, Contents.OTHER)

FEWEST = 2
"""A reduction of a single element is that of a loss or a count, unless a model has only one."""


def gradients_were_reduced(view: View) -> bool | None:
    """True unless it is certain that no gradient was reduced; None if nothing is known.

    A reduction counts if its tensors are gradients or copies of them, or if C++ issued it, as
    DistributedDataParallel does. Temporary tensors of unknown contents count if they have as many
    elements as the model.
    """
    calls = view.observed.calls
    if calls.reductions:
        return True
    reduced = view.observed.reduced_floats
    if reduced is None:
        return None
    total = view.parameters.whole_total
    accounted = []
    for rank in view.observed.by_rank:
        by_contents = [
            call.collective
            for call in view.observed.by_rank[rank].calls
            if _is_reduction(call) and call.collective is not None
        ]
        unknown = sum(one.elements for one in by_contents if one.contents is Contents.OTHER)
        if unknown >= max(total, FEWEST):
            return True
        accounted.append(
            sum(one.elements for one in by_contents if one.contents in NOT_OF_GRADIENTS)
        )
    return reduced - max(accounted, default=0) >= min(FEWEST, total)


def with_reduced_gradients(view: View) -> set[str]:
    """The parameters of which a gradient, or a copy of it, was seen to be reduced on every rank."""
    by_rank = []
    for rank in view.observed.by_rank:
        calls = [call for call in view.observed.calls.of(rank) if reduces_gradients(call)]
        by_rank.append(
            {name for call in calls if call.collective for name in call.collective.names}
        )
    return set.intersection(*by_rank) if by_rank else set()


def reduced_parameters(view: View) -> Sequence[str]:
    """The parameters that every rank was seen to reduce among ranks; empty if none was."""
    by_rank = []
    for rank in view.observed.by_rank:
        names = {
            name
            for call in view.observed.calls.of(rank)
            if _is_reduction(call) and call.collective is not None
            if call.collective.contents in OF_PARAMETERS
            for name in call.collective.names
        }
        by_rank.append(names)
    return sorted(set.intersection(*by_rank)) if by_rank else ()


def _is_reduction(call: Call) -> bool:
    return (
        call.kind is Kind.COLLECTIVE
        and call.collective is not None
        and call.collective.op in REDUCING
    )
