"""The backward passes of all ranks, and the same computed again from their rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddp_equivalence.diagnosis.example_gradients import LossAndGradient
from ddp_equivalence.diagnosis.residual import unexplained
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.calls import Call, Kind
from ddp_equivalence.measurement.gradient_watch import factor_between
from ddp_equivalence.measurement.observation import Forward, Indices

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

SAME_LOSS = 1e-5
"""Losses whose relative difference is smaller are equal: a part may be computed in float32."""


def same_loss(loss: float, right: float) -> bool:
    """True if two losses, or factors of losses, are equal up to rounding."""
    return abs(loss - right) <= SAME_LOSS * abs(right)


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
        return self.view.eps > COARSE or self.difference < SMALL

    @cached_property
    def is_one_parameter_far_off(self) -> bool:
        """True in a fine precision, if a single parameter, however small it is, is off by more
        than rounding alone.
        """
        view = self.view
        return self.view.eps <= COARSE and any(
            unexplained(view.measured.by_rank[:, place], view.expected_by_rank[:, place]) > FRACTION
            for name, place in view.parameters.places.items()
            if name in view.measured.differing
        )

    @cached_property
    def tolerance(self) -> float:
        """The largest relative difference of two equal vectors.

        Where ranks and big batch differ by little, that little must be told from rounding.
        """
        return min(
            tolerance_in(self.view.eps), max(ROUNDING * self.view.eps, FRACTION * self.difference)
        )

    @cached_property
    def difference(self) -> float:
        """How far the ranks are from the big batch, relative to what they hold."""
        return unexplained(self.view.measured.by_rank, self.view.expected_by_rank)

    @property
    def all(self) -> list[Piece]:
        """The pieces of all ranks."""
        return [piece for pieces in self.by_rank for piece in pieces]

    @cached_property
    def own(self) -> Tensor:
        """The sum of each rank's pieces, shape (world size, elements)."""
        zero = torch.zeros_like(self.view.expected)
        return torch.stack(
            [
                torch.stack([zero, *(piece.gradient for piece in of_rank)]).sum(0)
                for of_rank in self.by_rank
            ]
        )

    @cached_property
    def uniform_weight(self) -> float | None:
        """Every rank holds this many times the sum of all pieces; None if that is not so."""
        total = self.own.sum(0)
        weights = [self.factor_between(held, total) for held in self.view.measured.by_rank]
        known = [one for one in weights if one is not None]
        if len(known) != len(weights) or max(known) - min(known) > EQUAL * abs(known[0]):
            return None
        return known[0]

    @cached_property
    def loss_together(self) -> float | None:
        """The losses of all pieces, reduced as their gradients are; None if one is not known."""
        losses = [one.loss for one in self.all if one.loss is not None]
        if self.uniform_weight is None or len(losses) < len(self.all):
            return None
        return self.uniform_weight * sum(losses)

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
        """The number that ``found`` is ``right`` times; None if it is zero, or no multiple."""
        return factor_between(right, found, self.tolerance) or None


def tolerance_in(eps: float) -> float:
    """The largest relative difference of two equal vectors in a precision of this eps."""
    return max(EQUAL, (COARSE_ROUNDING if eps > COARSE else ROUNDING) * eps)


def pieces_of(view: View) -> Pieces | None:
    """The pieces; None unless every rank was watched and its gradients are of this sample."""
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
    """The rows that one rank read, if each of them can be one example only."""
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
