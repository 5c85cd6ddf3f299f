"""Modules that ran where gradients are turned off, such as a teacher, beside their rows alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces, eps_of, tolerance_in
from ddp_equivalence.diagnosis.whereabouts.replay import FirstDifference, agree, calls_of
from ddp_equivalence.diagnosis.whereabouts.replayed_loss import replay_of
from ddp_equivalence.diagnosis.whereabouts.station_text import module_text
from ddp_equivalence.measurement.trace import ModuleCall

SAME = 1e-5
"""Values whose relative difference is smaller are equal."""


@dataclass(frozen=True)
class WithoutGradients:
    """``all_agree``: every such call was compared with the same call of the loss of the case, and
    returned the same; True also where there was none. ``differs``: the first one that returned
    something else. ``same_input``: it was given the same.
    """

    all_agree: bool
    differs: ModuleCall | None = None
    same_input: bool = False


def without_gradients(pieces: Pieces, piece: Piece) -> WithoutGradients:
    """The calls of a piece where gradients are turned off, beside those of its rows alone.

    A module that was called more or less often than there is not compared.
    """
    here = sorted(calls_of(pieces, piece, without_gradients=True), key=lambda one: one.order[1])
    replay = replay_of(pieces, piece) if here else None
    if replay is None:
        return WithoutGradients(all_agree=not here)
    alone: dict[str, list[ModuleCall]] = {}
    for call in sorted(replay.calls, key=lambda one: one.order[1]):
        if not call.with_gradients:
            alone.setdefault(call.name, []).append(call)
    times = Counter(call.name for call in here)
    met: Counter[str] = Counter()
    complete = True
    for call in here:
        others = alone.get(call.name, [])
        if len(others) != times[call.name]:
            complete = False
            continue
        other = others[met[call.name]]
        met[call.name] += 1
        if call.returned is None or other.returned is None:
            complete = False
        elif not agree(call.returned, other.returned, _tolerance(pieces, call.returned.dtype)):
            same = call.given is not None and other.given is not None
            same = same and agree(call.given, other.given, _tolerance(pieces, ""))
            return WithoutGradients(all_agree=False, differs=call, same_input=same)
    return WithoutGradients(complete)


def agreement(found: FirstDifference, beside: WithoutGradients) -> str:
    """Which modules return what the rows give, as a clause."""
    if not found.before:
        return "no module was heard" if beside.differs is None else _not_as_alone(beside)
    if beside.differs is not None:
        return f"all modules with gradients return what the rows give; {_not_as_alone(beside)}"
    whose = "" if beside.all_agree else " that ran with gradients"
    return f"all modules{whose} return what the rows give"


def _not_as_alone(beside: WithoutGradients) -> str:
    same = ", for the same input" if beside.same_input else ""
    return f"without gradients {module_text(beside.differs)} returns other values{same}"


def _tolerance(pieces: Pieces, dtype: str) -> float:
    return max(pieces.tolerance, SAME, tolerance_in(eps_of(dtype)) if dtype else 0.0)
