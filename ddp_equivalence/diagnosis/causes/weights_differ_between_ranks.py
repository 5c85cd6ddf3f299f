"""The ranks began their forward passes with different weights."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, ranks_by_number
from ddp_equivalence.diagnosis.lines.words import counted, names_text
from ddp_equivalence.diagnosis.reduced import groups_text
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Contents, Kind


def indication(view: View) -> Indication | None:
    """Compares the digests of the weights before each rank's first forward pass."""
    ranks_by_digest: dict[str, list[int]] = {}
    for rank, observation in view.observed.by_rank.items():
        if observation.forwards and observation.forwards[0].weights:
            ranks_by_digest.setdefault(observation.forwards[0].weights, []).append(rank)
    if not ranks_by_digest:
        return None
    if len(ranks_by_digest) == 1:
        return Indication(False, "all ranks began the forward pass with the same weights")
    groups = "; ".join(ranks_by_number(ranks) for ranks in ranks_by_digest.values())
    because = f"before the first forward pass, weights differ between these groups: {groups}"
    return Indication(True, because, conclusive=True)


def lines(view: View) -> Sequence[PointedLine]:
    """Where the weights came to differ, and a broadcast that has not made them equal."""
    calls = view.observed.calls
    broadcasts = calls.places(Kind.COLLECTIVE, where=_sends_weights)
    parted = where_weights_part(view)
    pointed = []
    if parted is not None:
        note = f"changes {names_text(parted.names)}; the weights differ between ranks from here on"
        missing = "" if broadcasts else "a broadcast of all weights from rank 0"
        pointed.append(parted.pointed(note, is_fault=not broadcasts, missing=missing))
    for place in broadcasts[-1:]:
        collective = place.first.collective
        groups = groups_text(place.groups) if len(place.groups) > 1 else "one group"
        if collective is not None:
            note = f"{collective.op} of {names_text(place.names)} in {groups}"
            pointed.append(place.pointed(f"{note}; weights differ after it", is_fault=True))
    seeds = calls.places(Kind.SEED, where=lambda call: call.backwards == 0)
    differ = [place for place in seeds if len(_first_values(place)) > 1]
    shown = [place.pointed("seeds differ between ranks") for place in differ[-1:]]
    return [*shown, *pointed]


def _sends_weights(call: Call) -> bool:
    collective = call.collective
    return (
        call.backwards == 0
        and collective is not None
        and collective.contents in (Contents.PARAMETERS, Contents.COPIES_OF_PARAMETERS)
    )


def _first_values(place: CallSite) -> set[float | None]:
    return {calls[-1].value for calls in place.by_rank.values()}


def where_weights_part(view: View) -> CallSite | None:
    """The line after which the weights differed between ranks until the forward pass.

    None if no line was seen to change them so.
    """
    places = view.observed.calls.places(Kind.WEIGHTS)
    held = dict.fromkeys(view.observed.by_rank, "")  # the weights that the case gave to all ranks
    parted = None
    for place in places:
        held |= {rank: calls[-1].what for rank, calls in place.by_rank.items()}
        if len(set(held.values())) == 1:
            parted = None
        elif parted is None:
            parted = place
    return parted


def fix(view: View) -> str:
    """Broadcast the weights."""
    count = len(view.parameters.names)
    return f"broadcast all {counted(count, 'parameter')} from rank 0 before the first forward pass."


HYPOTHESIS = Hypothesis(
    name="weights_differ_between_ranks",
    sentence="The ranks did not begin the forward pass with the same weights, so that gradients of "
    "different models were averaged.",
    look_at="the broadcast of the initial weights (DistributedDataParallel does it; code that "
    "averages by hand must do it too), and seeds that depend on the rank",
    indication=indication,
    invalidates_gradients=True,
    tell_apart="Gradients alone cannot decide: compare the weights before the forward pass.",
    headline="ranks begin with different weights",
    lines=lines,
    fix=fix,
)
