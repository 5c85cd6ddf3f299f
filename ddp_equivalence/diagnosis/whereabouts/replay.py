"""Finds the first module whose output on a rank is not what the rank's own rows give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces, eps_of, tolerance_in
from ddp_equivalence.diagnosis.whereabouts.replayed_loss import replay_of
from ddp_equivalence.measurement.trace import ModuleCall, TensorSample, unpacked

Key = tuple[str, int]
"""The name of a module, and which of its calls this is."""


@dataclass(frozen=True)
class FirstDifference:
    """``what``: "input" if the module was given other values than in the replay, "output" if it was
    given the same and returned others, "missing" if the rank never called it, "none" if all calls
    agree. ``call``: the call on the rank; of a missing one, the next that differs. ``before``: the
    last call that agrees. ``alone``: the same call in the replay.
    """

    what: Literal["input", "output", "missing", "none"]
    call: ModuleCall | None = None
    before: ModuleCall | None = None
    alone: ModuleCall | None = None


def first_difference(pieces: Pieces, piece: Piece) -> FirstDifference | None:
    """Where the rank's forward passes of this piece leave those of its rows alone.

    None if that is not known, as where the loss of the case calls the model more or less often.
    """
    if piece.rows is None or piece.call is None:
        return None
    seen = calls_of(pieces, piece)
    replayed = _replayed(pieces, piece)
    if not seen or not replayed:
        return None
    passes = [sum(not call.name for call in calls) for calls in (seen, replayed)]
    if passes[0] not in (0, passes[1]):
        return None
    if not passes[0]:  # the step calls the modules of the model one by one
        replayed = tuple(call for call in replayed if call.name)
    alone = _by_key(replayed)
    here = _by_key(seen)
    others = {call.name for call in calls_of(pieces, piece, without_gradients=True)}
    before: ModuleCall | None = None
    for key, call, begins in _events(here):
        other = alone.get(key)
        if other is None:
            continue  # the rank calls what the case's loss does not call
        ours = call.given if begins else call.returned
        theirs = other.given if begins else other.returned
        if not agree(ours, theirs, _tolerance(pieces, key, piece.number, begins)):
            skipped = _skipped(alone, {*here, *((name, 0) for name in others)}, other)
            if skipped is not None:
                return FirstDifference("missing", call, before, skipped)
            return FirstDifference("input" if begins else "output", call, before, other)
        before = before if begins else call
    for key, call, begins in _events(alone):
        if key not in here and key[0] not in others and not begins:
            return FirstDifference("missing", None, before, call)
    return FirstDifference("none", None, before)


def _skipped(
    alone: dict[Key, ModuleCall], here: Collection[Key], until: ModuleCall
) -> ModuleCall | None:
    """The last call of the replay that ended before this one, and that the rank never made."""
    missed = [
        call for key, call in alone.items() if key not in here and call.order[1] < until.order[0]
    ]
    return max(missed, key=lambda call: call.order[1], default=None)


def calls_of(
    pieces: Pieces, piece: Piece, without_gradients: bool = False
) -> tuple[ModuleCall, ...]:
    """The calls of modules on the rank since the backward pass before this piece.

    ``without_gradients``: those where gradients are turned off, instead of the others.
    """
    trace = pieces.view.observed.by_rank[piece.rank].trace
    if piece.call is None:
        return ()
    return tuple(
        call
        for call in trace.module_calls
        if call.step == pieces.view.setting.step
        and call.backwards == piece.call.backwards
        and call.with_gradients is not without_gradients
    )


def _events(calls: dict[Key, ModuleCall]) -> list[tuple[Key, ModuleCall, bool]]:
    """The beginnings (True) and ends (False) of the calls, in their order."""
    events = [
        (call.order[0 if begins else 1], key, call, begins)
        for key, call in calls.items()
        for begins in (True, False)
    ]
    return [(key, call, begins) for _, key, call, begins in sorted(events, key=lambda e: e[0])]


def _by_key(calls: Sequence[ModuleCall]) -> dict[Key, ModuleCall]:
    times: Counter[str] = Counter()
    found = {}
    for call in sorted(calls, key=lambda one: one.order[0]):
        found[call.name, times[call.name]] = call
        times[call.name] += 1
    return found


def _replayed(pieces: Pieces, piece: Piece) -> tuple[ModuleCall, ...]:
    """The calls of modules when the loss of the case is computed of the piece's rows alone."""
    found = replay_of(pieces, piece)
    return () if found is None else found.with_gradients


def _tolerance(pieces: Pieces, key: Key, number: int, begins: bool) -> float:
    """What may part two equal tensors: the precision that all ranks have used here, or better."""
    dtypes = set()
    for of_rank in pieces.by_rank:
        if number < len(of_rank):
            call = _by_key(calls_of(pieces, of_rank[number])).get(key)
            sample = call and (call.given if begins else call.returned)
            dtypes.add(sample.dtype if sample else "")
    if len(dtypes) != 1 or "" in dtypes:
        return pieces.tolerance
    eps = eps_of(dtypes.pop())
    return max(pieces.tolerance, tolerance_in(eps) if eps > pieces.eps else 0.0)


def agree(ours: TensorSample | None, theirs: TensorSample | None, tolerance: float) -> bool:
    """True if two samples have the same shape, and their values differ by no more than this."""
    if ours is None or theirs is None:
        return True  # nothing is known of one of them
    if ours.shape != theirs.shape:
        return False
    found, right = unpacked(ours.values), unpacked(theirs.values)
    found, right = found.nan_to_num(1e300), right.nan_to_num(1e300)
    scale = max(float(found.norm()), float(right.norm()))
    return float((found - right).norm()) <= tolerance * scale
