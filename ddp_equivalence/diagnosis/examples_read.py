"""The examples that the ranks really read, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from ddp_equivalence.case.batch import take
from ddp_equivalence.diagnosis.hypothesis import Prediction, on_every_rank, ranks_by_number
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.setting import all_divisors
from ddp_equivalence.diagnosis.view import View
from ddp_equivalence.measurement.observation import Observation


def predictions_from_examples_read(view: View, detail: str = "") -> Sequence[Prediction]:
    """The gradients that right code would leave if exactly these examples were the big batch, and
    those of code that divides by what the big batch divides by.

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
    together = view.examples.gradient(everything_read)
    results = [
        contributions.mean(0),
        together,
        *(local.mean(0) for local in view.local_gradients[1:]),
        *(ratio * together for ratio in _ratios(view, everything_read)),
    ]
    if view.parts.add_up_to_the_big_batch:
        results.append(contributions.sum(0))
    others = (one for one in results if not nearly_equal(one, view.expected))
    return on_every_rank(view, *others, detail=detail)


def _ratios(view: View, read: Sequence[int]) -> list[float]:
    """How much more than the big batch these examples are, in each unit that is counted."""
    setting = view.setting
    counts = all_divisors(take(setting.batch, read, setting.case.batch_dims), len(read))
    whole = all_divisors(setting.batch, setting.example_count)
    ratios = (counts[unit] / count for unit, count in whole.items() if count and unit in counts)
    return [one for one in dict.fromkeys(ratios) if one not in (0.0, 1.0)]


def examples_seen(view: View, examples: Sequence[int], most: int = 6) -> str:
    """The examples as text, with a note if equal ones may have been read instead of them."""
    are_certain = view.observed.equal_where_read.isdisjoint(examples)
    return example_numbers(examples, most) + ("" if are_certain else " (or equal ones)")


def example_numbers(examples: Sequence[int], most: int = 6) -> str:
    """The examples as text: ``example 3``, ``examples 3, 5, ... (12 in all)``."""
    word = "example" if len(examples) == 1 else "examples"
    return f"{word} {short_numbers(examples, most)}"


def short_numbers(examples: Sequence[int], most: int = 4) -> str:
    """The numbers of examples as text: ``3, 5, ... (12 in all)``, or ``3 to 7`` for neighbours."""
    if len(examples) > 2 and list(examples) == list(range(examples[0], examples[-1] + 1)):
        return f"{examples[0]} to {examples[-1]}"
    shown = ", ".join(map(str, examples[:most]))
    return shown + (f", ... ({len(examples)} in all)" if len(examples) > most else "")


def read_more_than_once(view: View) -> list[int]:
    """The examples that were read more than once, on all ranks together."""
    return sorted(index for index, times in view.observed.times_read.items() if times > 1)


def read_by_no_rank(view: View) -> list[int]:
    """The examples that no rank read."""
    times_read = view.observed.times_read
    return [index for index in range(view.setting.example_count) if not times_read[index]]


def counted_reads(view: View) -> list[Counter[int]]:
    """How often each rank read each example, in passes whose gradients are not all zero."""
    found = []
    for rank, parts in enumerate(view.observed.examples_read or ()):
        gradients = [one.gradient for one in view.observed.backwards(rank)]
        counts = [True] * len(parts)
        if len(gradients) == len(parts):
            counts = [one is None or bool(one.any()) for one in gradients]
        read = (index for part, so in zip(parts, counts, strict=True) if so for index in part)
        found.append(Counter(read))
    return found


def read_by_several_ranks(view: View) -> dict[tuple[int, ...], list[int]]:
    """Several ranks -> the examples that each of them read, and no other rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    read = counted_reads(view)
    for index in range(view.setting.example_count):
        ranks = tuple(rank for rank, times in enumerate(read) if times[index])
        if len(ranks) > 1:
            found.setdefault(ranks, []).append(index)
    return found


def is_divided_up(view: View) -> bool | None:
    """True if every example was read by one rank, and as often as all others; None if unknown."""
    if view.observed.examples_read is None:
        return None
    return read_equally_often(view) and not read_by_several_ranks(view)


def read_equally_often(view: View) -> bool:
    """True if every example was read, and each as often as all others."""
    times = {view.observed.times_read[index] for index in range(view.setting.example_count)}
    return len(times) == 1 and 0 not in times


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
        by_rank.append(again)
    return by_rank if all(by_rank) else []


def all_ranks_read_the_same(view: View) -> bool:
    """True if every rank read the same examples."""
    read = view.observed.examples_read or ()
    distinct = {tuple(sorted(index for part in parts for index in part)) for parts in read}
    return len(read) > 1 and len(distinct) == 1 and distinct != {()}


MOST_GROUPS = 2


def rows_read_unequally(view: View) -> str:
    """Which examples were read by several ranks, more often than others, or by none, as a sentence;
    "" if all were read equally often, as by ranks that share a model, or if it is not known.
    """
    if view.observed.examples_read is None:
        return ""
    if read_equally_often(view) or passes_of_read_examples(view):
        return ""
    text = "; ".join(texts_of_rows(view))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def texts_of_rows(view: View) -> list[str]:
    """Clauses: who reads the same examples, and which are read by no rank."""
    several, texts = read_by_several_ranks(view), list[str]()
    for ranks, examples in list(several.items())[:MOST_GROUPS]:
        word, shown = "both" if len(ranks) == 2 else "all", examples_seen(view, examples, 4)
        read = shown.partition(" ")[2] if texts else f"read {shown}"
        texts.append(f"{ranks_by_number(ranks)} {word} {read}")
    more = len(several) - MOST_GROUPS
    if more > 0:
        texts.append(f"{more} more set{'s' if more > 1 else ''} of ranks share others")
    unread = _missed(view)
    shown = short_numbers(unread) if texts else example_numbers(unread, 4)
    return [*texts, f"no rank reads {shown}"] if unread else texts


def _missed(view: View) -> list[int]:
    """The examples that no rank read; [] if the big batch is the same without them, as where a mask
    leaves them out.
    """
    unread = read_by_no_rank(view)
    others = tuple(index for index in range(view.setting.example_count) if index not in unread)
    if not unread or not others:
        return unread
    return [] if nearly_equal(view.examples.gradient(others), view.expected) else unread


def order_read(
    observed: Mapping[int, Observation], sizes: Sequence[int], ranks: int
) -> tuple[int, ...]:
    """The examples of the batch in the order in which the steps read them, step after step.

    Within a step they are sorted. A step that reads fewer examples than its big batch has is given
    the first ones that no step reads. () if it is not known what was read, if it is the order of
    the batch, if a step reads more, or if two steps read the same example.

    ``sizes``: the number of examples of each step. ``ranks``: how many there are.
    """
    if len(observed) != ranks or len(sizes) < 2:
        return ()
    by_step = [_read_in(step, observed.values()) for step in range(len(sizes))]
    known = [read for read in by_step if read is not None]
    if len(known) < len(sizes) or any(
        len(read) > size for read, size in zip(known, sizes, strict=True)
    ):
        return ()
    times = Counter(chain.from_iterable(known))
    if any(count > 1 for count in times.values()) or not times:
        return ()
    unread = iter([one for one in range(sum(sizes)) if one not in times])
    order: list[int] = []
    for read, size in zip(known, sizes, strict=True):
        order += sorted([*read, *islice(unread, size - len(read))])
    return () if order == sorted(order) else tuple(order)


def _read_in(step: int, observed: Iterable[Observation]) -> frozenset[int] | None:
    """The examples that the ranks read in this step; None if one of them is not known."""
    read: set[int] = set()
    for seen in observed:
        parts = seen.rows_read(step)
        if parts is None:
            return None
        for one in {one.candidates: one for part in parts for one in part}.values():
            if not one.is_certain:
                return None
            read |= set(one.if_certain)
    return frozenset(read)
