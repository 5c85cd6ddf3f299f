"""Several ranks read the same examples, as where the line that takes a rank's share is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.ranks_shuffle_apart import ranks_shuffled_apart
from ddp_equivalence.diagnosis.causes.sampler_padding_counted import is_padding
from ddp_equivalence.diagnosis.examples_read import (
    all_ranks_read_the_same,
    example_numbers,
    passes_of_read_examples,
    predictions_from_examples_read,
    read_by_no_rank,
    read_by_several_ranks,
    read_equally_often,
    texts_of_rows,
)
from ddp_equivalence.diagnosis.hypothesis import Hypothesis, Indication, Prediction
from ddp_equivalence.diagnosis.lines import of_data
from ddp_equivalence.diagnosis.lines.of_data import (
    lines_of_wrong_samplers,
    lines_that_replace_rows,
    lines_that_share,
    with_reads,
)
from ddp_equivalence.diagnosis.setting import PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of everything that was read, as often as it was."""
    if not shares_overlap(view):
        return ()
    return predictions_from_examples_read(view, _who_reads_what(view), counts_all=True)


def shares_overlap(view: View) -> bool:
    """True if several ranks read the same examples, and no other cause says why.

    Ranks that share a model read the same ones: all examples are then read equally often.
    """
    if all_ranks_read_the_same(view) or ranks_shuffled_apart(view) or is_padding(view):
        return False
    if passes_of_read_examples(view) or lines_that_replace_rows(view):
        return False
    return bool(read_by_several_ranks(view)) and not read_equally_often(view)


def _who_reads_what(view: View) -> str:
    return "; ".join(texts_of_rows(view))


def indication(view: View) -> Indication | None:
    """Looks for examples that several ranks read."""
    if view.observed.examples_read is None or not shares_overlap(view):
        return None
    return Indication(True, _who_reads_what(view))


def lines(view: View) -> Sequence[PointedLine]:
    """The lines that choose what a rank reads, and where it is read."""
    ranks = next(iter(read_by_several_ranks(view)), ())
    sharing = lines_of_wrong_samplers(view)[:2] or lines_that_share(view, ranks)
    read = [
        place.pointed(of_data.what_was_read(view, place, ranks), is_fault=not sharing)
        for place in of_data.reads(view)
        if set(ranks) & set(place.ranks)
    ]
    return with_reads(sharing, read[-1:])


def fix(view: View) -> str:
    """Divide the examples among the ranks."""
    several = sorted(one for examples in read_by_several_ranks(view).values() for one in examples)
    text = f"let only one rank read {example_numbers(several, most=4)}"
    unread = read_by_no_rank(view)
    return f"{text}, and one read {example_numbers(unread, most=4)}." if unread else f"{text}."


HYPOTHESIS = Hypothesis(
    name="shares_overlap",
    sentence="Several ranks read the same examples, which then count more than once.",
    look_at="the line that takes a rank's share of the examples: a slice, a stride or a condition "
    "on the rank, which must give every example to one rank",
    predict=predict,
    indication=indication,
    tell_apart="Gradients alone cannot decide: compare the examples that the ranks read.",
    headline="several ranks read the same examples",
    lines=lines,
    fix=fix,
)
