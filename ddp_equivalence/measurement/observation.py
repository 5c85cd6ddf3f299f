"""What a rank was seen to do while its step ran: which examples it read, and what it reduced.

These are frozen dataclasses. The ranks send them to the judging process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.measurement.calls import Call, CodeLine
from ddp_equivalence.measurement.cuts import Cut, OwnBackward
from ddp_equivalence.measurement.random_draws import Draw
from ddp_equivalence.measurement.trace import Trace
from ddp_equivalence.ranks.collectives import Collective

Indices = tuple[int, ...]
"""Positions of examples in the big batch."""


@dataclass(frozen=True)
class RowsRead:
    """The rows that the model was called with, as rows of the big batch.

    ``candidates``: for every row, all positions in the big batch that it may come from: several, if
    these have equal rows. ``part``: which part of each row was read; "" for whole rows.
    ``declared``: the step has said it, by ``rank.read``, and it was not recognised.
    """

    candidates: tuple[Indices, ...]
    part: str = ""
    declared: bool = False

    @property
    def is_certain(self) -> bool:
        """True if every row can come from one position only."""
        return all(len(positions) == 1 for positions in self.candidates)

    @property
    def if_certain(self) -> Indices:
        """The position of every row; () unless every row can come from one position only."""
        return tuple(positions[0] for positions in self.candidates) if self.is_certain else ()


@dataclass(frozen=True)
class Forward:
    """One call of the model with gradients enabled.

    ``rows``: the rows that the model was called with; None if they are not known to be rows of the
    batch. ``weights``: a digest of the parameters at that moment. ``generator``: the state of
    torch's CPU generator. ``seed``: the seed of the generator in use, which is the GPU's on CUDA.
    ``step``: the number of the step, from 0. ``buffers``: what the model's buffers held then; empty
    if they are not known.
    """

    rows: RowsRead | None
    weights: str
    generator: bytes
    seed: int
    step: int
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Backward:
    """One call of backward.

    ``loss``: the value of the scalar that backward was called on (of several, the sum); None if
    there was no scalar. ``forwards``: how many forward passes had run before.
    ``issued``: how many collectives had been issued when it began and when it ended; None if torch
    has no flight recorder. ``step``: the number of the step, from 0. ``gradient``: the sampled
    elements of the gradient that this call computed on this rank, before any reduction, shape
    (elements,); None if it computed none.
    """

    loss: float | None
    forwards: int
    issued: tuple[int | None, int | None]
    step: int
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Wrapper:
    """One DistributedDataParallel wrapper around the model.

    ``synchronised``: for each of its forward passes, whether DDP was to reduce gradients in the
    backward pass. ``freed``: True if the wrapper was freed after a forward pass, before the
    backward pass began. ``buckets``: the names of the parameters in each bucket, as of the last
    forward pass. ``ignored``: the names of parameters that it was told not to reduce. ``logged``:
    entries of DDP's own logging data.
    """

    synchronised: tuple[bool, ...]
    freed: bool
    buckets: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    logged: Mapping[str, object]


@dataclass(frozen=True)
class Observation:
    """Everything that one rank did in all steps.

    ``frozen``: the parameters that required no gradient after the last step. ``buffers``: a digest
    of the model's buffers after the last step. ``gradients``: a digest of every gradient that a
    step left. ``clipped``: the norms that torch was told to clip gradients to. ``collectives``: all
    that the rank issued; None if torch has no flight recorder. ``equal_examples``: groups of
    examples of the big batch that are equal in every tensor. ``calls``: those that matter for the
    gradients, in their order, with their lines. ``lines_run``: the steps and the lines of the
    user's code that ran, each once, in the order of their first run, without those of the forward
    pass. ``trace``: values on the way. ``cuts``: where something without a gradient was computed
    from something that has one. ``own_backwards``: the user's own backward methods that ran.
    ``draws``: the random numbers that were drawn, if they were recorded, and ``left`` the sampled
    elements of the gradients that the first step left then. ``draws`` is None without a record.
    """

    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    wrappers: tuple[Wrapper, ...]
    frozen: tuple[str, ...]
    buffers: str
    gradients: Mapping[GradientKey, str]
    clipped: tuple[float, ...] = ()
    collectives: tuple[Collective, ...] | None = None
    equal_examples: tuple[Indices, ...] = ()
    calls: tuple[Call, ...] = ()
    lines_run: tuple[tuple[int, CodeLine], ...] = ()
    trace: Trace = field(default_factory=Trace)
    cuts: tuple[Cut, ...] = ()
    own_backwards: tuple[OwnBackward, ...] = ()
    draws: tuple[Draw, ...] | None = None
    left: Mapping[str, Tensor] = field(default_factory=dict)

    def rows_read(self, step: int) -> tuple[tuple[RowsRead, ...], ...] | None:
        """The rows of each micro-batch of one step; None if they are not known.

        A micro-batch has the rows of all forward passes that belong to one backward pass. If
        several of these forward passes read the same rows, or parts of the same rows, the rows
        count once.
        """
        micro_batches: list[tuple[RowsRead, ...]] = []
        begin = 0
        for backward in self.backwards:
            passes = [forward.rows for forward in self.forwards[begin : backward.forwards]]
            begin = backward.forwards
            if backward.step != step:
                continue
            if any(rows is None for rows in passes):
                return None
            distinct = {rows.candidates: rows for rows in passes if rows is not None}
            if passes:
                micro_batches.append(tuple(distinct.values()))
        return tuple(micro_batches) or None
