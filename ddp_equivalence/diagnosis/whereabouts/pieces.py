"""The backward passes of all ranks, and the same computed again from their rows alone."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_equivalence.case.batch import take
from ddp_equivalence.case.build import build_model
from ddp_equivalence.case.errors import BadCase
from ddp_equivalence.diagnosis.example_gradients import LossAndGradient
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.setting import Setting
from ddp_equivalence.diagnosis.time_left import TimeLeft
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.faults.plant import without_planted_faults
from ddp_equivalence.measurement.calls import (
    Call,
    Kind,
    ModuleCall,
    Operations,
    TensorSample,
    unpacked,
)
from ddp_equivalence.measurement.draws import Draw, DrawReplay
from ddp_equivalence.measurement.observation import Forward, Indices, ModuleWatch
from ddp_equivalence.measurement.operation_log import OperationLog
from ddp_equivalence.reference import in_dtype, loss_of_the_case, train

# The backward passes of all ranks in one step, with what each computed and from which rows.

EQUAL = 1e-6
"""Float64 vectors whose relative difference is smaller are equal."""

ROUNDING = 100.0
"""Vectors of a lower precision are equal if their relative difference is at most this many eps."""

COARSE = 1e-4
"""A larger eps is that of a coarse precision, in which 100 eps would be all of a vector."""

COARSE_ROUNDING = 8.0
"""In a coarse precision vectors are equal if they differ by at most this many eps."""


FRACTION = 0.05
"""Vectors that differ by this part of the difference are equal beside it."""

SMALL = 1e-5
"""A smaller difference may be one of precision on all ranks alike."""


@dataclass(frozen=True)
class Piece:
    """One call of backward that reached parameters.

    ``number``: among the rank's pieces of the step, from 0. ``gradient``: what it computed on this
    rank before any reduction, shape (elements,). ``loss``: where it began; None if not known.
    ``rows``: the examples that its forward passes read, in their order; None if not known.
    ``forward``: the first of these forward passes. ``call``: the recorded call; None if none was.
    """

    rank: int
    number: int
    gradient: Tensor
    loss: float | None
    rows: Indices | None
    forward: Forward | None
    call: Call | None


@dataclass(frozen=True)
class Pieces:
    """``by_rank``: for every rank of the layout, its pieces in order."""

    view: View
    by_rank: tuple[tuple[Piece, ...], ...]

    @cached_property
    def is_coarse(self) -> bool:
        """True if all ranks compute coarsely, beside how little differs, as under autocast."""
        return self.eps > COARSE or self.difference < SMALL

    @cached_property
    def is_one_parameter_far_off(self) -> bool:
        """True if a single parameter is off by more than rounding alone, however small it is."""
        view = self.view
        return any(
            unexplained(view.measured.by_rank[:, place], view.expected_by_rank[:, place]) > FRACTION
            for name, place in view.parameters.places.items()
            if name in view.measured.differing
        )

    @cached_property
    def tolerance(self) -> float:
        """The largest relative difference of two equal vectors.

        Where ranks and big batch differ by little, that little must be told from rounding.
        """
        return min(tolerance_in(self.eps), max(ROUNDING * self.eps, FRACTION * self.difference))

    @cached_property
    def difference(self) -> float:
        """How far the ranks are from the big batch, relative to what they hold."""
        return unexplained(self.view.measured.by_rank, self.view.expected_by_rank)

    @cached_property
    def eps(self) -> float:
        """That of the model, or of the lowest precision in which every rank has called modules."""
        lowest = []
        for seen in self.view.observed.by_rank.values():
            dtypes = {
                sample.dtype
                for call in seen.trace.module_calls
                for sample in (call.given, call.returned)
                if sample is not None
            }
            lowest.append(max((eps_of(dtype) for dtype in dtypes), default=0.0))
        own = float(torch.finfo(self.view.setting.dtype).eps)
        return max(own, min(lowest, default=0.0))

    @property
    def all(self) -> list[Piece]:
        """The pieces of all ranks."""
        return [piece for pieces in self.by_rank for piece in pieces]

    @cached_property
    def own(self) -> Tensor:
        """What each rank computed in all of its pieces, shape (world size, elements)."""
        zero = torch.zeros_like(self.view.expected)
        return torch.stack(
            [
                torch.stack([zero, *(piece.gradient for piece in of_rank)]).sum(0)
                for of_rank in self.by_rank
            ]
        )

    def alone(self, piece: Piece, drawn_again: bool = False) -> LossAndGradient | None:
        """The loss and gradient of the piece's rows alone; None if these are not known.

        ``drawn_again``: with the random numbers that the rank's forward pass drew.
        """
        if piece.rows is None:
            return None
        generator = piece.forward.generator if drawn_again and piece.forward else b""
        found = self.view.examples.compute(piece.rows, generator)
        return found if bool(found.gradient.isfinite().all()) else None

    def factor_between(self, found: Tensor, right: Tensor) -> float | None:
        """The number that ``found`` is ``right`` times; None if it is no multiple of it."""
        square = float(right @ right)
        norm = float(found.norm())
        if not norm or not square or not bool(found.isfinite().all()):
            return None
        factor = float(found @ right) / square
        return factor if float((found - factor * right).norm()) <= self.tolerance * norm else None


def eps_of(dtype: str) -> float:
    """The eps of a dtype of floating-point numbers, by name."""
    return float(torch.finfo(getattr(torch, dtype)).eps)


def tolerance_in(eps: float) -> float:
    """The largest relative difference of two equal vectors in a precision of this eps."""
    return max(EQUAL, (COARSE_ROUNDING if eps > COARSE else ROUNDING) * eps)


def pieces_of(view: View, without_gradients: bool = False) -> Pieces | None:
    """The pieces; None unless every rank was watched and its gradients are of this sample.

    ``without_gradients``: the backward passes whose gradients are not known count too, as zeros.
    """
    if not view.observed.covers_every_rank:
        return None
    rows = rows_by_rank(view)
    by_rank = []
    for rank in range(view.world_size):
        backwards = view.observed.backwards(rank)
        called = [one for one in view.observed.calls.of(rank) if one.kind is Kind.BACKWARD]
        forwards, begin = view.observed.by_rank[rank].forwards, 0
        of_rank: list[Piece] = []
        for number, backward in enumerate(backwards):
            passes = [
                one for one in forwards[begin : backward.forwards] if one.step == backward.step
            ]
            begin = backward.forwards
            gradient = backward.gradient
            if gradient is None and without_gradients:
                gradient = torch.zeros_like(view.expected)
            if gradient is None:
                continue
            if len(gradient) != len(view.expected):
                return None
            of_rank.append(
                Piece(
                    rank=rank,
                    number=len(of_rank),
                    gradient=view.setting.scale * gradient,
                    loss=backward.loss,
                    rows=rows[rank][number] if len(rows[rank]) == len(backwards) else None,
                    forward=passes[0] if passes else None,
                    call=called[number] if len(called) == len(backwards) else None,
                )
            )
        by_rank.append(tuple(of_rank))
    return Pieces(view, tuple(by_rank))


def rows_by_rank(view: View) -> Sequence[Sequence[Indices]]:
    """For every rank, the examples of each backward pass; empty where they are not known.

    A rank that was given some examples, and has called the model once, is taken to mean these.
    """
    read = view.observed.examples_read
    found: list[Sequence[Indices]] = []
    for rank in range(view.world_size):
        if read is not None:
            found.append(read[rank])
            continue
        certain = _certain_rows(view, rank)
        shards = view.setting.shards
        if certain is not None:
            found.append(certain)
        elif shards is not None and len(view.observed.backwards(rank)) == 1:
            found.append((shards[rank],))
        else:
            found.append(())
    return found


def _certain_rows(view: View, rank: int) -> list[Indices] | None:
    """What one rank read, if each row can be one example only."""
    micro_batches = view.observed.by_rank[rank].rows_read(view.setting.step)
    if micro_batches is None:
        return None
    first, last = view.setting.first_example, view.setting.example_count
    found = []
    for passes in micro_batches:
        if not all(rows.is_certain for rows in passes):
            return None
        rows = tuple(places[0] - first for rows in passes for places in rows.candidates)
        if any(not 0 <= row < last for row in rows):
            return None
        found.append(rows)
    return found


# Computes the loss of the case of some rows alone, and watches it as the ranks are watched.


@dataclass(frozen=True)
class Replay:
    """``calls``: of modules."""

    calls: tuple[ModuleCall, ...]

    @property
    def with_gradients(self) -> tuple[ModuleCall, ...]:
        """The calls of modules where gradients are turned on."""
        return tuple(call for call in self.calls if call.with_gradients)


def replay_of(pieces: Pieces, piece: Piece) -> Replay | None:
    """What the loss of the case does with the rows of a piece; None if that is not known."""
    if piece.rows is None:
        return None
    setting = pieces.view.setting
    generator = piece.forward.generator if piece.forward and setting.draws_on_cpu else b""
    draws = pieces.view.examples.drawn_for(piece.rows)
    return replay_of_rows(setting, piece.rows, pieces.view.time, generator, draws)


def replay_of_rows(
    setting: Setting,
    rows: Indices,
    time: TimeLeft,
    generator: bytes = b"",
    draws: Sequence[Draw] | None = None,
) -> Replay | None:
    """What the loss of the case does with these rows; None if it cannot be computed.

    ``generator``: the state that torch's generator gets before it, unless this is empty.
    ``draws``: the random numbers that it draws, if they are known.
    """
    loss = loss_of_the_case(setting.case)
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

    batches = [
        in_dtype(one, torch.float64)
        for one in (
            *setting.earlier_batches,
            take(setting.batch, rows, setting.case.batch_dims),
        )
    ]
    with time.gradient(len(rows)), warnings.catch_warnings(), without_planted_faults():
        warnings.simplefilter("ignore")
        model = build_model(setting.case).double()
        modules = ModuleWatch(model, lambda: (number, 0, not inside))
        try:
            drawing = nullcontext() if draws is None else DrawReplay(draws).watching()
            with modules.watching(), drawing:
                train(setting.case, model, batches, "gradients", setting.training, counted)
        except BadCase:
            return None
    last = len(batches) - 1
    return Replay(tuple(call for call in modules.calls if call.step == last))


# Finds the first module whose output on a rank is not what the rank's own rows give.

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


# Records the operations of the loss of the case, of the big batch and of parts of it.


def operations_of_the_loss(
    setting: Setting, parts: Sequence[Indices], time: TimeLeft
) -> list[Operations] | None:
    """What the loss of the case, and its backward pass, compute of each of these parts of the big
    batch, in float64.

    The last of several steps is recorded. None if a loss cannot be computed or is too long.
    """
    found = []
    for part in parts:
        with time.gradient(len(part)):
            operations = _operations(setting, part)
        if operations is None or not operations.complete:
            return None
        found.append(operations)
    return found


def _operations(setting: Setting, part: Indices) -> Operations | None:
    loss = loss_of_the_case(setting.case)
    batches = [
        in_dtype(one, torch.float64)
        for one in (*setting.earlier_batches, take(setting.batch, part, setting.case.batch_dims))
    ]
    log = OperationLog()
    number = 0

    def logged(model: nn.Module, batch: Any) -> Tensor:
        nonlocal number
        number += 1
        if number < len(batches):
            value: Tensor = loss(model, batch)
            return value
        running.enter_context(log)
        last: Tensor = loss(model, batch)
        return last

    with warnings.catch_warnings(), without_planted_faults(), ExitStack() as running:
        warnings.simplefilter("ignore")
        try:
            model = build_model(setting.case).double()
            train(setting.case, model, batches, "gradients", setting.training, logged)
        except BadCase:
            return None
    return log.found({})


# How the call of a module whose output differs is unlike the same call in the replay.


def notes_of_output(pieces: Pieces, piece: Piece, here: ModuleCall, alone: ModuleCall) -> list[str]:
    """Other modes, types and shapes, as clauses. ``alone``: the call in the replay."""
    notes = []
    if here.training != alone.training:
        notes.append(f"it is in {_mode(here)} mode, and in {_mode(alone)} mode for the big batch")
    dtypes = _other_dtypes(pieces, piece, here)
    if dtypes:
        notes.append(dtypes)
    if here.returned and alone.returned and here.returned.shape != alone.returned.shape:
        notes.append(f"the shape is {here.returned.shape}, not {alone.returned.shape}")
    return notes


def _other_dtypes(pieces: Pieces, piece: Piece, call: ModuleCall) -> str:
    here = call.returned.dtype if call.returned else ""
    for of_rank in pieces.by_rank:
        for other_piece in of_rank[piece.number : piece.number + 1]:
            for other in calls_of(pieces, other_piece):
                there = other.returned.dtype if other.returned else ""
                if other.name == call.name and here and there and there != here:
                    return f"it is {here} here, and {there} on rank {other_piece.rank}"
    return ""


def _mode(call: ModuleCall) -> str:
    return "training" if call.training else "evaluation"
