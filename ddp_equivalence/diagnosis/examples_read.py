"""Gradients of what the ranks really read: what the causes about data predict."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.hypothesis import Way
from ddp_equivalence.diagnosis.view import View, near


def as_read(view: View) -> Sequence[Way]:
    """What a right rule leaves of the examples that were read, where that is not the big batch."""
    if view.read is None:
        return ()
    found = view.contributions(view.read)
    if found is None:
        return ()
    everything = tuple(i for of_rank in view.read for part in of_rank for i in part)
    results = [found.mean(0), view.gradient(everything), *(own.mean(0) for own in view.owns[1:])]
    if view.is_sum():
        results.append(found.sum(0))
    return tuple(Way(view.everywhere(one)) for one in results if not near(one, view.expected))


def numbers(indices: Sequence[int], most: int = 6) -> str:
    """``example 3``, ``examples 3, 5, ... (12 in all)``."""
    word = "example" if len(indices) == 1 else "examples"
    shown = ", ".join(map(str, indices[:most]))
    return f"{word} {shown}" + (f", ... ({len(indices)} in all)" if len(indices) > most else "")


def twice(view: View) -> list[int]:
    """Examples that were read more than once."""
    return sorted(index for index, times in view.times_read.items() if times > 1)


def never(view: View) -> list[int]:
    """Examples that no rank read."""
    return [index for index in range(view.examples) if not view.times_read[index]]


def all_the_same(view: View) -> bool:
    """True if every rank read the same examples."""
    read = view.read or ()
    every = {tuple(sorted(i for part in of_rank for i in part)) for of_rank in read}
    return len(read) > 1 and len(every) == 1 and every != {()}
