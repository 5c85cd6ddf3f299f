"""The examples that the ranks really read, and the gradients that right code makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_equivalence.diagnosis.hypothesis import Prediction
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View


def predictions_from_examples_read(view: View, detail: str = "") -> Sequence[Prediction]:
    """The gradients that right code would leave if exactly these examples were the big batch.

    A gradient that equals the big batch's is left out.
    """
    read = view.observed.examples_read
    if read is None:
        return ()
    parts_read = replace(view.parts, by_rank=read)
    contributions = parts_read.contributions()
    if contributions is None:
        return ()
    everything_read = tuple(index for part in parts_read.examples_by_rank for index in part)
    results = [
        contributions.mean(0),
        view.examples.gradient(everything_read),
        *(local.mean(0) for local in view.local_gradients[1:]),
    ]
    if view.parts.add_up_to_the_big_batch:
        results.append(contributions.sum(0))
    return tuple(
        Prediction(view.on_every_rank(result), detail)
        for result in results
        if not nearly_equal(result, view.expected)
    )


def examples_seen(view: View, examples: Sequence[int]) -> str:
    """The examples as text, with a note if equal ones may have been read instead of them."""
    numbers = example_numbers(examples)
    if view.observed.equal_where_read.isdisjoint(examples):
        return numbers
    return f"{numbers} (or examples that are equal to these)"


def example_numbers(examples: Sequence[int], most: int = 6) -> str:
    """The examples as text: ``example 3``, ``examples 3, 5, ... (12 in all)``."""
    word = "example" if len(examples) == 1 else "examples"
    shown = ", ".join(map(str, examples[:most]))
    return f"{word} {shown}" + (f", ... ({len(examples)} in all)" if len(examples) > most else "")


def read_more_than_once(view: View) -> list[int]:
    """The examples that were read more than once, on all ranks together."""
    return sorted(index for index, times in view.observed.times_read.items() if times > 1)


def read_by_no_rank(view: View) -> list[int]:
    """The examples that no rank read."""
    times_read = view.observed.times_read
    return [index for index in range(view.setting.example_count) if not times_read[index]]


def passes_of_read_examples(view: View) -> list[tuple[int, ...]]:
    """For every rank, the micro-batches whose examples another of its micro-batches has too.

    Empty unless every rank has one. Each is given as its number on its rank, from 0.
    """
    by_rank = []
    for parts in view.observed.examples_read or ():
        again = tuple(
            number
            for number, part in enumerate(parts)
            if part
            and any(
                set(part) < set(other) or (set(part) == set(other) and number < place)
                for place, other in enumerate(parts)
                if place != number
            )
        )
        if not again:
            return []
        by_rank.append(again)
    return by_rank


def all_ranks_read_the_same(view: View) -> bool:
    """True if every rank read the same examples."""
    read = view.observed.examples_read or ()
    distinct = {tuple(sorted(index for part in parts for index in part)) for parts in read}
    return len(read) > 1 and len(distinct) == 1 and distinct != {()}
