"""Finds the first module whose output on a rank is not what the rank's own rows give."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.whereabouts.pieces import Piece, Pieces, eps_of, tolerance_in
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.module_watch import ModuleWatch
from ddp_equivalence.measurement.trace import ModuleCall, TensorSample, unpacked
from ddp_equivalence.reference import in_dtype, loss_of_the_case, train

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
    before: ModuleCall | None = None
    for key, call, begins in _events(here):
        other = alone.get(key)
        if other is None:
            continue  # the rank calls what the case's loss does not call
        ours = call.given if begins else call.returned
        theirs = other.given if begins else other.returned
        if not _agree(ours, theirs, _tolerance(pieces, key, piece.number, begins)):
            skipped = _skipped(alone, here, other)
            if skipped is not None:
                return FirstDifference("missing", call, before, skipped)
            return FirstDifference("input" if begins else "output", call, before, other)
        before = before if begins else call
    for key, call, begins in _events(alone):
        if key not in here and not begins:
            return FirstDifference("missing", None, before, call)
    return FirstDifference("none", None, before)


def _skipped(
    alone: dict[Key, ModuleCall], here: dict[Key, ModuleCall], until: ModuleCall
) -> ModuleCall | None:
    """The last call of the replay that ended before this one, and that the rank never made."""
    missed = [
        call for key, call in alone.items() if key not in here and call.order[1] < until.order[0]
    ]
    return max(missed, key=lambda call: call.order[1], default=None)


def calls_of(pieces: Pieces, piece: Piece) -> tuple[ModuleCall, ...]:
    """The calls of modules on the rank since the backward pass before this piece."""
    trace = pieces.view.observed.by_rank[piece.rank].trace
    if piece.call is None:
        return ()
    return tuple(
        call
        for call in trace.module_calls
        if call.step == pieces.view.setting.step and call.backwards == piece.call.backwards
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
    setting = pieces.view.setting
    loss = loss_of_the_case(setting.case)
    generator = piece.forward.generator if piece.forward and setting.draws_on_cpu else b""
    number, inside = -1, False

    def counted(model: nn.Module, batch: Any) -> Any:
        nonlocal number, inside
        number, inside = number + 1, True
        if generator:
            torch.set_rng_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
        try:
            return loss(model, batch)
        finally:
            inside = False

    assert piece.rows is not None
    rows = take(setting.batch, piece.rows, setting.case.batch_dims)
    batches = [in_dtype(one, torch.float64) for one in (*setting.earlier_batches, rows)]
    with (
        pieces.view.time.gradient(len(piece.rows)),
        warnings.catch_warnings(),
        without_planted_faults(),
    ):
        warnings.simplefilter("ignore")
        model = build_model(setting.case).double()
        watch = ModuleWatch(model, lambda: (number, 0, not inside))
        try:
            with watch.watching():
                train(setting.case, model, batches, "gradients", setting.lr, counted)
        except BadCase:
            return ()
    return tuple(call for call in watch.calls if call.step == len(batches) - 1)


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


def _agree(ours: TensorSample | None, theirs: TensorSample | None, tolerance: float) -> bool:
    if ours is None or theirs is None:
        return True  # nothing is known of one of them
    if ours.shape != theirs.shape:
        return False
    found, right = unpacked(ours.values), unpacked(theirs.values)
    found, right = found.nan_to_num(1e300), right.nan_to_num(1e300)
    scale = max(float(found.norm()), float(right.norm()))
    return float((found - right).norm()) <= tolerance * scale
