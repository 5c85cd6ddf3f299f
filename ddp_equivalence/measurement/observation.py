"""What a rank was seen to do while its step ran: what it read, from which weights, what it sent.

Frozen data, which travels from the ranks to the process that judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ddp_equivalence.case.steps import GradientKey
from ddp_equivalence.ranks.collectives import Collective

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Forward:
    """One call of the model with gradients on, in ``step`` (from 0).

    ``examples``: positions in the big batch of the rows that it was called with, in their order;
    None if they are none of the batch's rows. ``weights``: digest of the parameters at that moment.
    ``generator``: state of torch's generator on the CPU; ``seed``: what it was last seeded with.
    """

    examples: Indices | None
    weights: str
    generator: bytes
    seed: int
    step: int


@dataclass(frozen=True)
class Backward:
    """One call of backward, in ``step`` (from 0).

    ``loss``: the value that it began at. ``gradient``: what it gave the parameters on this rank, as
    the selection has it, before anything was reduced; None if it gave nothing. ``forwards``: how
    many there had been before it.
    ``issued``: how many collectives had been issued before it and when it ended; None if torch has
    no flight recorder.
    """

    loss: float | None
    forwards: int
    issued: tuple[int | None, int | None]
    step: int
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Wrapper:
    """One DistributedDataParallel around the model.

    ``synchronised``: of each of its forward passes, whether it was to reduce gradients.
    ``freed``: True if the wrapper was gone when a backward began that it had to reduce.
    ``buckets``: names of the parameters in each bucket, as of the last forward pass.
    ``ignored``: names that it was told not to reduce. ``logged``: what DDP logs of itself.
    """

    synchronised: tuple[bool, ...]
    freed: bool
    buckets: tuple[tuple[str, ...], ...]
    ignored: tuple[str, ...]
    logged: Mapping[str, object]


@dataclass(frozen=True)
class Observation:
    """What one rank did in all steps.

    ``frozen``: parameters that required no gradient in the end. ``buffers``: digest of the model's
    buffers in the end. ``collectives``: all it issued, None without a flight recorder.
    ``gradients``: digest of what it left, by name. ``clipped``: norms that torch was told to clip
    to.
    """

    forwards: tuple[Forward, ...]
    backwards: tuple[Backward, ...]
    wrappers: tuple[Wrapper, ...]
    frozen: tuple[str, ...]
    buffers: str
    gradients: Mapping[GradientKey, str]
    clipped: tuple[float, ...] = ()
    collectives: tuple[Collective, ...] | None = None

    def read(self, step: int) -> tuple[Indices, ...] | None:
        """The micro-batches of one step: the examples of each backward, None if unknown.

        A backward whose forward passes all read the same examples has read them once.
        """
        found: list[Indices] = []
        begin = 0
        for backward in self.backwards:
            passes = [one.examples for one in self.forwards[begin : backward.forwards]]
            begin = backward.forwards
            if backward.step != step:
                continue
            if any(one is None for one in passes):
                return None
            distinct = dict.fromkeys(one for one in passes if one is not None)
            if passes:
                found.append(tuple(index for one in distinct for index in one))
        return tuple(found) or None
