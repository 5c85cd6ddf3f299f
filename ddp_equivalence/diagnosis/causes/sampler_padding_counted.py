"""Examples that pad all shards to the same length are counted twice."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_equivalence.diagnosis.causes.ranks_shuffle_apart import ranks_shuffled_apart
from ddp_equivalence.diagnosis.examples_read import (
    all_ranks_read_the_same,
    example_numbers,
    examples_seen,
    passes_of_read_examples,
    predictions_from_examples_read,
    read_by_no_rank,
    read_by_several_ranks,
    read_more_than_once,
    share_sizes,
)
from ddp_equivalence.diagnosis.hypothesis import (
    Hypothesis,
    Indication,
    Prediction,
    indication_if,
    ranks_by_number,
)
from ddp_equivalence.diagnosis.lines import of_data
from ddp_equivalence.diagnosis.lines.of_data import lines_that_share
from ddp_equivalence.diagnosis.setting import CallSite, PointedLine
from ddp_equivalence.diagnosis.view import View


def predict(view: View) -> Sequence[Prediction]:
    """The gradient of all examples that were read, if some examples were read more than once."""
    repeated = read_more_than_once(view)
    if not is_padding(view) or all_ranks_read_the_same(view) or ranks_shuffled_apart(view):
        return ()
    detail = f"{examples_seen(view, repeated)} read more than once"
    return predictions_from_examples_read(view, detail, counts_all=True)


def is_padding(view: View) -> bool:
    """True if examples were read again so that all ranks read equally many, and none is missing.

    A rank that goes twice over its own examples pads nothing, and neither do slices that overlap.
    """
    if not read_more_than_once(view) or read_by_no_rank(view) or passes_of_read_examples(view):
        return False
    if _are_overlapping_slices(view):
        return False
    return len(share_sizes(view)) == 1 or not read_by_several_ranks(view)


def _are_overlapping_slices(view: View) -> bool:
    """True if each rank read examples that follow each other, where there is nothing to pad.

    A sampler pads with the first examples, or with the last of a rank, until the ranks can read
    equally many. Examples that the ranks could share equally need no padding.
    """
    read = view.observed.examples_read
    if read is None or view.setting.example_count % view.world_size:
        return False
    by_rank = [sorted({one for part in parts for one in part}) for parts in read]
    follow = all(one and one[-1] - one[0] == len(one) - 1 for one in by_rank)
    return follow and bool(read_by_several_ranks(view))


def indication(view: View) -> Indication | None:
    """Counts how often each example was read."""
    if view.observed.examples_read is None:
        return None
    repeated = read_more_than_once(view)
    if repeated and read_by_no_rank(view):
        return Indication(False, "some examples were read twice, but others by no rank")
    if repeated and passes_of_read_examples(view):
        return Indication(False, "ranks read a micro-batch of their own once more")
    if repeated and not is_padding(view):
        return Indication(False, "examples were read again, and yet the ranks read unequally many")
    return indication_if(
        bool(repeated),
        f"{examples_seen(view, repeated)} (of {view.setting.example_count}) read more than once",
        "no example was read twice",
    )


def lines(view: View) -> Sequence[PointedLine]:
    """The sampler that pads, or the lines where examples are read again."""
    repeated = read_more_than_once(view)
    pads = [
        place.pointed(
            f"pads {place.first.value:.0f} examples by {of_data.padding_of(place)}",
            is_fault=True,
        )
        for place in of_data.samplers(view)
        if of_data.padding_of(place)
    ]
    pads = pads or of_data.line_that_repeats(view, repeated)
    pads = pads or of_data.lines_of_own_sampler(view)
    pads = pads or lines_that_share(view)
    pointed = []
    for place in of_data.reads(view):
        if of_data.ranks_that_read(view, place, repeated):
            note = _who_read(view, place, repeated[:2])
            pointed.append(place.pointed(note, is_fault=not pads))
    return [*pads[:2], *pointed[: 3 - len(pads[:2])]]


def _who_read(view: View, place: CallSite, examples: Sequence[int]) -> str:
    """Which ranks read each of these examples at this place."""
    readers = {one: of_data.ranks_that_read(view, place, [one]) for one in examples}
    return "; ".join(
        f"{ranks_by_number(ranks)} read{'s' if len(ranks) == 1 else ''} example {one}"
        for one, ranks in readers.items()
        if ranks
    )


def fix(view: View) -> str:
    """Count every example once."""
    repeated, count = read_more_than_once(view), view.setting.example_count
    names = example_numbers(repeated, most=4)
    return f"count {names} once: give the repetitions no weight, and divide by {count}."


HYPOTHESIS = Hypothesis(
    name="sampler_padding_counted",
    sentence="Some examples were read more than once and counted each time. A sampler does this to "
    "pad all shards to the same length.",
    look_at="DistributedSampler(drop_last=False) where the number of examples is not a multiple of "
    "the number of ranks: give the repeated examples no weight, or use uneven shards with a global "
    "mean",
    predict=predict,
    indication=indication,
    tell_apart="Use a multiple of the number of ranks as the number of examples: no padding is "
    "then needed.",
    headline="some examples are counted twice",
    lines=lines,
    fix=fix,
)
