"""Which examples were read by several ranks, more often than others, or by none, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.examples_read import (
    compact_numbers,
    counted_reads,
    passes_of_read_examples,
    read_by_no_rank,
    read_by_several_ranks,
    read_equally_often,
)
from ddp_equivalence.diagnosis.indications import ranks_by_number
from ddp_equivalence.diagnosis.residual import nearly_equal
from ddp_equivalence.diagnosis.view import View

MOST_GROUPS = 2


def rows_read_unequally(view: View) -> str:
    """The sentence; "" if all examples were read equally often, or if it is not known.

    Ranks that share a model read the same rows: where every example is read by as many ranks, that
    is said to be nothing.
    """
    if view.observed.examples_read is None:
        return ""
    if read_equally_often(view) or passes_of_read_examples(view):
        return ""
    text = "; ".join(texts_of_rows(view))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def texts_of_rows(view: View) -> list[str]:
    """Clauses: who reads the same examples, which are read again by one rank, and which by none."""
    several = read_by_several_ranks(view)
    texts: list[str] = []
    for ranks, examples in list(several.items())[:MOST_GROUPS]:
        word = "both" if len(ranks) == 2 else "all"
        read = word if texts else f"{word} read example{'s' if len(examples) > 1 else ''}"
        texts.append(f"{ranks_by_number(ranks)} {read} {_numbers(view, examples)}")
    more = len(several) - MOST_GROUPS
    if more > 0:
        texts.append(f"{more} more set{'s' if more > 1 else ''} of ranks share others")
    shared = {index for examples in several.values() for index in examples}
    again = {
        index: rank
        for rank, times in enumerate(counted_reads(view))
        for index, number in sorted(times.items())
        if number > 1 and index not in shared
    }
    if again and not several:
        who = ranks_by_number(sorted(set(again.values())))
        verb = "reads" if len(set(again.values())) == 1 else "read"
        word = "example" if len(again) == 1 else "examples"
        texts.append(f"{who} {verb} {word} {_numbers(view, sorted(again))} more than once")
    unread = _missed(view)
    word = "" if texts else "example " if len(unread) == 1 else "examples "
    texts += [f"no rank reads {word}{compact_numbers(unread)}"] if unread else []
    return texts


def _numbers(view: View, examples: Sequence[int]) -> str:
    """The examples as text, with a note if equal ones may have been read instead of them."""
    are_certain = view.observed.equal_where_read.isdisjoint(examples)
    return compact_numbers(examples) + ("" if are_certain else " (or equal ones)")


def _missed(view: View) -> list[int]:
    """The examples that no rank read; [] if the big batch is the same without them, as where a mask
    leaves them out.
    """
    unread = set(read_by_no_rank(view))
    others = tuple(index for index in range(view.setting.example_count) if index not in unread)
    if not unread or not others:
        return sorted(unread)
    is_same = nearly_equal(view.examples.gradient(others), view.expected)
    return [] if is_same else sorted(unread)
