"""What the evidence of the ranks can say for or against a cause."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Sign
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.observation import Wrapper
from ddp_equivalence.ranks.collectives import FORGOTTEN

CLOSE = 1e-4
"""Losses that agree within this are one: what float32 leaves of them. In lower precision they say
nothing."""


def wrappers(view: View) -> list[Wrapper]:
    """Every DistributedDataParallel that was made around the model, on any rank."""
    return [one for seen in view.observed.values() for one in seen.wrappers]


def reduced_elements(view: View) -> int | None:
    """Elements that went through an all-reduce or reduce-scatter, on the rank with fewest.

    None where that is not known.
    """
    logs = [seen.collectives for seen in view.observed.values()]
    known = [log for log in logs if log is not None and all(one.op != FORGOTTEN for one in log)]
    if not logs or len(known) != len(logs):
        return None
    return min(sum(one.elements for one in log if "reduce" in one.op) for log in known)


def gathers(view: View) -> bool:
    """True if a rank gathered anything."""
    logs = [seen.collectives or () for seen in view.observed.values()]
    return any("gather" in one.op and one.elements > 1 for log in logs for one in log)


def losses(view: View) -> list[tuple[float, float]] | None:
    """Of every backward on every rank: the loss it began at, and that of the examples it read.

    None where either is not known.
    """
    if view.read is None:
        return None
    found = []
    for rank, micro_batches in enumerate(view.read):
        values = [one.loss for one in view.observed[rank].backwards]
        if len(values) != len(micro_batches):
            return None
        for value, examples in zip(values, micro_batches, strict=True):
            expected = view.piece(examples).loss
            if value is None or value != value or expected != expected:
                continue
            found.append((value, expected))
    return found or None


def loss_factor(view: View) -> float | None:
    """How many times the loss of its own examples every backward began at; None if it differs."""
    pairs = [(value, own) for value, own in losses(view) or () if own]
    factors = [value / own for value, own in pairs]
    if not factors or not all(close(one, factors[0]) for one in factors):
        return None
    return sum(factors) / len(factors)


def loss_is_the_big_batch(view: View) -> bool:
    """True if every backward began at the loss of the whole batch, which is none of its own."""
    pairs = losses(view)
    if pairs is None:
        return False
    whole = view.piece(tuple(range(view.examples))).loss
    return all(close(value, whole) for value, _ in pairs) and not all(
        close(own, whole) for _, own in pairs
    )


def close(one: float, other: float) -> bool:
    """Equal but for the rounding of a loss."""
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))


def only_if(holds: bool | None, because: str, otherwise: str, decides: bool = False) -> Sign | None:
    """For the cause if it holds, against it if not; nothing where that is not known."""
    if holds is None:
        return None
    return Sign(holds, because if holds else otherwise, decides and holds)


def listed(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 3``: the ranks by number."""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
